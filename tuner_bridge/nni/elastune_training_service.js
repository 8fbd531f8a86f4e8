'use strict';
/*
 * The door through which NNI 3.0 takes trials to elastune.
 *
 * NNI asks a registered package for an EnvironmentService, which its TrialDispatcher would drive. That dispatcher does
 * not know waiting trials and cannot carry results, so this service replaces the methods of the RouterTrainingService
 * above it, which is NNI's own interface of a training service. NNI's last release is 3.0, which these lines are for.
 *
 * All knowledge is in a Python process beside the manager (tuner_bridge.nni.experiment_driver), spoken to in JSON lines.
 */
const childProcess = require('child_process');
const fs = require('fs');
const path = require('path');
const readline = require('readline');

const NNI = path.dirname(process.argv[1]);
const { version } = JSON.parse(fs.readFileSync(path.join(NNI, 'package.json'), 'utf8'));
if (!/^3\.0(\.|$)/.test(version)) {
    throw new Error(`elastune's training service is for NNI 3.0, this is NNI ${version}; pip install nni==3.0`);
}
const load = name => require(path.join(NNI, name));
const { EnvironmentService } = load('training_service/reusable/environment');
const { RouterTrainingService } = load('training_service/reusable/routerTrainingService');
const { IocShim } = load('common/ioc_shim');
const { Manager } = load('common/manager');
const { DataStore } = load('common/datastore');
const { uniqueString } = load('common/utils');
const log = load('common/log').getLogger('Elastune');

const LIVE = new Set(['WAITING', 'RUNNING', 'UNKNOWN']);
const POLL_SECONDS = 0.2;
const RESTARTS = 5;
const ATTEMPTS = 5;
/* Tuners that minimize where nothing else is said; the others maximize. */
const MINIMIZING = new Set(['TPE', 'TPE_legacy', 'Anneal']);
const RESTART_MS = 1000;
const pause = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));

class ElastuneTrainingService {
    constructor(config, info) {
        this.config = config;
        this.info = info;
        this.words = path.join(info.logDir, 'log', 'elastune.log');
        this.manager = IocShim.get(Manager);
        this.store = IocShim.get(DataStore);
        // How often the manager looks at its trials; its own 5 seconds are for clusters that are slow to ask.
        this.manager.pollInterval = POLL_SECONDS;
        this.trials = new Map();
        this.results = new Map();
        this.asked = new Map();
        this.cancelled = new Map();
        this.questions = 0;
        this.introduced = Promise.resolve();
        this.stopping = false;
        this.restarts = 0;
        this.ended = new Promise((resolve, reject) => { this.finish = resolve; this.fail = reject; });
        this.ended.catch(() => { /* told by run() */ });
    }

    // ---------------------------------------------------------------- the driver's process

    experiment() {
        const c = this.config;
        const folder = this.info.logDir;
        const given = { weight: c.weight, priority: c.priority, quota: c.quota, goal: c.goal, yields_to: c.yieldsTo };
        return {
            experiment: this.info.experimentId,
            name: (this.manager.config || {}).experimentName,
            command: c.trialCommand,
            code_dir: c.trialCodeDirectory,
            trials_dir: path.join(folder, 'trials'),
            state_dir: path.join(folder, 'elastune'),
            direction: this.direction(),
            scheduler_url: c.schedulerUrl,
            slots: c.slots, slots_per_gpu: c.slotsPerGpu, gpus_per_slot: c.gpusPerSlot, memory_per_slot: c.memoryPerSlot,
            min_replicas: c.minReplicas, max_replicas: c.maxReplicas, slots_per_replica: c.slotsPerReplica,
            warm_start: c.warmStart, trackers: c.trackers,
            terms: Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined && value !== null)),
        };
    }
    direction() {
        const { tuner, assessor } = this.manager.config || {};
        const mode = algorithm => algorithm && algorithm.classArgs && algorithm.classArgs.optimize_mode;
        const byDefault = tuner && MINIMIZING.has(tuner.name) ? 'minimize' : 'maximize';
        return mode(tuner) || mode(assessor) || byDefault;
    }
    start() {
        const root = path.dirname(path.dirname(__dirname));
        const environ = { ...process.env, PYTHONPATH: [root, process.env.PYTHONPATH].filter(Boolean).join(path.delimiter) };
        const words = fs.openSync(this.words, 'a', 0o600);
        this.driver = childProcess.spawn(this.config.python, ['-m', 'tuner_bridge.nni.experiment_driver'],
            { stdio: ['pipe', 'pipe', words], env: environ, detached: true });
        fs.closeSync(words);
        this.driver.stdin.on('error', () => { /* its end is told by 'exit' */ });
        this.driver.on('error', error => this.gone(`${this.config.python} cannot be started: ${error.message}`));
        this.driver.on('exit', (code, signal) => this.gone(`the driver ended (${signal || code})`));
        // One after the other: a result is written down before the next message is looked at.
        let last = Promise.resolve();
        readline.createInterface({ input: this.driver.stdout }).on('line', line => {
            last = last.then(() => this.hear(JSON.parse(line))).catch(error => log.error('message not understood', line, error));
        });
        this.tell(this.experiment());
    }
    tell(message) {
        if (this.driver.stdin.writable) this.driver.stdin.write(JSON.stringify(message) + '\n');
    }
    async gone(why) {
        if (this.stopping) { this.finish(); return; }
        if (this.refused !== undefined || ++this.restarts > RESTARTS) {
            this.fail(new Error(this.refused || `${why}; see ${this.words}`));
            return;
        }
        log.warning(`${why}; starting another one`);
        this.ready = false;
        for (const answer of this.asked.values()) answer('the scheduler is away; try again\n');
        this.asked.clear();
        await pause(RESTART_MS);
        if (this.stopping) this.finish();
        else this.start();
    }
    async hear(message) {
        if (message.ready) {
            this.restarts = 0;
            this.ready = true;
            log.info(`study ${message.study} on the scheduler at ${message.scheduler}, ${message.slots} slots`);
            for (const id of this.results.keys()) this.submit(this.trials.get(id));
            for (const [id, why] of this.cancelled) this.tell({ cancel: id, why });
        } else if (message.refused !== undefined) {
            this.refused = message.refused;
        } else if (message.log !== undefined) {
            const answer = this.asked.get(message.id);
            this.asked.delete(message.id);
            if (answer) answer(message.log);
        } else if (message.metric !== undefined) {
            if (await this.result(message)) this.tell({ taken: message.number });
        } else {
            this.status(message);
        }
    }

    // ---------------------------------------------------------------- trials

    submit(trial) {
        if (!this.ready || !LIVE.has(trial.status)) return;
        const taken = Math.max(-1, ...this.results.get(trial.id).PERIODICAL) + 1;
        const { sequenceId: sequence, hyperParameters: { value: parameter } } = trial.form;
        this.tell({ submit: { trial: trial.id, sequence, parameter, taken } });
    }
    async introduce(trial) {
        // The manager drops results of trials that it has not noted yet.
        while (!this.manager.trialJobs.has(trial.id)) {
            if (this.stopping) return;
            await pause(10);
        }
        const seen = { PERIODICAL: new Set(), FINAL: new Set() };
        // NNI gives every final result the sequence 0; they are told apart by their order.
        for (const metric of await this.store.getMetricData(trial.id)) {
            seen[metric.type].add(metric.type === 'FINAL' ? seen.FINAL.size : metric.sequence);
        }
        this.results.set(trial.id, seen);
        this.submit(trial);
    }
    /* Whether the result needs no more care: it is written down, or nobody wants it. */
    async result({ trial: id, metric: text, order }) {
        const trial = this.trials.get(id);
        const seen = this.results.get(id);
        const metric = JSON.parse(text);
        if (!trial || !seen || !LIVE.has(trial.status) || seen[metric.type].has(order)) return true;
        // NNI takes no results while it stops, which may take it half a minute. The trial tells it again when resumed.
        if (this.manager.getStatus().status === 'STOPPING') return false;
        for (let attempt = 1; ; attempt++) {
            try {
                await this.manager.onTrialJobMetrics({ id, data: text });
                seen[metric.type].add(order);
                return true;
            } catch (error) {
                if (attempt < ATTEMPTS) {
                    await pause(RESTART_MS);
                    continue;
                }
                // As NNI itself does with a result that it cannot write down: the experiment is in error.
                this.manager.criticalError(error);
                return false;
            }
        }
    }
    status({ trial: id, status, message }) {
        const trial = this.trials.get(id);
        if (!trial || !LIVE.has(trial.status)) return;
        trial.message = message;
        // A trial that has trained and is paused, or restarted, still runs in NNI's words.
        if (status === 'WAITING' && trial.startTime !== undefined) return;
        if (status === 'RUNNING' && trial.startTime === undefined) trial.startTime = Date.now();
        if (!LIVE.has(status)) {
            trial.startTime = trial.startTime || Date.now();
            trial.endTime = Date.now();
        }
        trial.status = status;
    }

    // ---------------------------------------------------------------- NNI's interface of a training service

    async run() {
        // NNI gives its tuner 10 seconds to start; on a small machine the scheduler's start would cost it some of them.
        const tuner = this.manager.dispatcher;
        if (tuner && tuner.connect && !tuner.connect.settled) await tuner.connect.promise;
        this.start();
        await this.ended;
    }
    // NNI gets copies: it stores a status, waits for its database, and then looks at the same object again. Of a trial that
    // ended meanwhile it would forget the end.
    async listTrialJobs() { return [...this.trials.values()].map(trial => ({ ...trial })); }
    async getTrialJob(id) { return { ...this.find(id) }; }
    find(id) {
        const trial = this.trials.get(id);
        if (!trial) throw new Error(`trial job ${id} not found`);
        return trial;
    }
    async submitTrialJob(form) {
        const trial = {
            id: form.id || uniqueString(5), status: 'WAITING', submitTime: Date.now(), startTime: undefined,
            endTime: undefined, workingDirectory: '', url: '', message: 'submitted', tags: [], form,
        };
        trial.workingDirectory = path.join(this.info.logDir, 'trials', trial.id);
        trial.url = `file://localhost:${trial.workingDirectory}`;
        this.trials.set(trial.id, trial);
        // One after the other: the driver hears of trials in NNI's order, whichever the store answers first.
        this.introduced = this.introduced.then(() => this.introduce(trial)).catch(error => {
            log.error('trial not submitted', trial.id, error);
            this.status({ trial: trial.id, status: 'FAILED', message: String(error) });
        });
        return { ...trial };
    }
    async updateTrialJob(id) {
        throw new Error(`trial job ${id}: tuners that change the parameters of a running trial are not supported`);
    }
    async cancelTrialJob(id, isEarlyStopped) {
        const trial = this.find(id);
        // An experiment that stops keeps its trials, to go on with them when it is resumed.
        if (!LIVE.has(trial.status) || this.manager.getStatus().status === 'STOPPING') return;
        trial.isEarlyStopped = Boolean(isEarlyStopped);
        trial.status = isEarlyStopped ? 'EARLY_STOPPED' : 'USER_CANCELED';
        trial.endTime = Date.now();
        const why = isEarlyStopped ? "stopped early by NNI's assessor" : 'cancelled in NNI';
        // Again to the next driver, should this one end before it has passed it on.
        this.cancelled.set(id, why);
        this.tell({ cancel: id, why });
    }
    async getTrialFile(id, name) {
        await this.getTrialJob(id);
        if (!this.ready) return '';
        const question = this.questions++;
        const answer = new Promise(resolve => this.asked.set(question, resolve));
        this.tell({ log: id, id: question, name });
        return await answer;
    }
    async cleanUp() {
        this.stopping = true;
        const gone = this.driver === undefined || this.driver.exitCode !== null || this.driver.signalCode !== null;
        if (gone) { this.finish(); return; }
        this.driver.stdin.end();
        await this.ended;
    }
    addTrialJobMetricListener() { /* results go to the manager one by one, and are waited for */ }
    removeTrialJobMetricListener() { /* the same */ }
    async setClusterMetadata() { /* of NNI 1 */ }
    async getClusterMetadata() { return ''; }
    async getTrialOutputLocalPath(id) { return (await this.getTrialJob(id)).workingDirectory; }
    async fetchTrialOutput() { throw new Error('the output of trials lies where they wrote it; there is nothing to fetch'); }
}

const METHODS = Object.getOwnPropertyNames(RouterTrainingService.prototype).filter(name => name !== 'constructor');

class ElastuneEnvironmentService extends EnvironmentService {
    constructor(config, info) {
        super();
        const service = new ElastuneTrainingService(config, info);
        for (const name of METHODS) RouterTrainingService.prototype[name] = service[name].bind(service);
    }
    get hasStorageService() { return false; }
    get getName() { return 'tuner_bridge'; }
    initCommandChannel() { this.commandChannel = {}; }
    async refreshEnvironmentsStatus() { /* there are no environments */ }
    async startEnvironment() { /* the same */ }
    async stopEnvironment() { /* the same */ }
}

module.exports = { ElastuneEnvironmentService, ElastuneTrainingService };
