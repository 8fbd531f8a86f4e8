"""Databases of earlier versions come up to date whole, or stay as they were."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import trials.store
from trials.errors import StoreUnavailable
from trials.spec import TrialSpec
from trials.states import TrialState
from trials.store import SqlTrialStore, schema
from trials.store.tables import metadata

MIGRATIONS = Path(trials.store.__file__).parent / "migrations"


@pytest.fixture
def script() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return ScriptDirectory.from_config(config)


def first_version(path: Path) -> None:
    """A database as the first version left it: one study, one trial, one entry of its history."""
    engine = sa.create_engine(f"sqlite:///{path}")
    with pytest.MonkeyPatch.context() as patch, schema._whole(engine) as connection:
        patch.setattr(schema, "HEAD", "0001")
        schema._upgrade(connection)
        connection.exec_driver_sql("DROP TABLE alembic_version")
        connection.exec_driver_sql("CREATE TABLE about (schema_version INTEGER NOT NULL)")
        connection.exec_driver_sql("INSERT INTO about VALUES (1)")
        connection.exec_driver_sql("INSERT INTO studies VALUES ('s', 'maximize', 2.5, NULL, NULL)")
        connection.exec_driver_sql("INSERT INTO history VALUES (1, 4.0, 't1', 'paused', 'held', 'why')")
        connection.exec_driver_sql(
            "INSERT INTO trials VALUES (1, 't1', 's', 0, ?, 'paused', 'held', 'why', 3.0, NULL, 2, '[\"a\"]', 2, '[]', "
            "0.0, NULL, 2, 0, 0.0, 0, NULL, NULL, NULL)",
            ('{"study": "s", "number": 0, "entrypoint": "m:f"}',),
        )
    engine.dispose()


def test_the_steps_lead_to_the_tables_that_are_used(tmp_path: Path, script: ScriptDirectory) -> None:
    assert script.get_current_head() == schema.HEAD
    first_version(tmp_path / "trials.db")
    SqlTrialStore(f"sqlite:///{tmp_path / 'trials.db'}").close()
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'trials.db'}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_what_an_earlier_version_kept_is_there_afterwards(tmp_path: Path) -> None:
    first_version(tmp_path / "trials.db")
    store = SqlTrialStore(f"sqlite:///{tmp_path / 'trials.db'}")
    [study] = store.studies()
    assert (study.direction, study.terms.weight) == ("maximize", 2.5)
    [trial] = store.trials()
    assert (trial.trial_id, trial.state, trial.members) == ("t1", TrialState.PAUSED, ("a",))
    [entry] = store.history("t1")
    assert (entry.who, entry.reason.sentence) == ("scheduler", "why")
    assert store.submit(TrialSpec(study="s", number=1, entrypoint="m:f"), 5.0).trial_id != "t1"
    store.close()


@pytest.mark.parametrize("dies_at", ["ALTER TABLE", "DROP TABLE", "UPDATE alembic_version"])
def test_a_migration_that_dies_half_way_changes_nothing(tmp_path: Path, dies_at: str) -> None:
    path = tmp_path / "trials.db"
    first_version(path)
    with sqlite3.connect(path) as connection:
        before = list(connection.iterdump())
    connection.close()
    child = os.fork()
    if child == 0:
        engine = sa.create_engine(f"sqlite:///{path}")

        @sa.event.listens_for(engine, "before_cursor_execute")
        def die(_conn: object, _cursor: object, statement: str, *_: object) -> None:
            if dies_at in statement and "about" not in statement:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            schema.bring_up_to_date(engine)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with sqlite3.connect(path) as connection:
        assert list(connection.iterdump()) == before
    connection.close()
    store = SqlTrialStore(f"sqlite:///{path}")
    assert [trial.trial_id for trial in store.trials()] == ["t1"]
    store.close()


def test_tables_of_a_later_version_are_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    SqlTrialStore(url).close()
    with sqlite3.connect(tmp_path / "trials.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
    connection.close()
    with pytest.raises(StoreUnavailable, match=r"tables of version 0999.*knows those up to"):
        SqlTrialStore(url)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trials.db").write_bytes(b"not a database, but long enough to look at\n" * 100)
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        SqlTrialStore(f"sqlite:///{tmp_path / 'trials.db'}")
