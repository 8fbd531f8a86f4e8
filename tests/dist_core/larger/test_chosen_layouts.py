"""What a model says of the layouts that it can be trained with, and which it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from dist_core.errors import InvalidTraining, ReplicaExit
from dist_core.goodput import Hints
from dist_core.goodput.layout_terms import LayoutTerms
from dist_core.larger.choice import kinds_that_train
from dist_core.larger.model import ElasticModel
from dist_core.larger.predicted import in_memory, model_costs, predicted_terms, slot_memory
from dist_core.larger.schedules import largest_microbatch
from dist_core.larger.stages import blocks_of, cut, recompute_in
from dist_core.layout import Layout
from dist_core.link.client import ControlChannel
from dist_core.link.environment import SLOT_MEMORY, ReplicaEnvironment
from dist_core.partition.balance import PipelineTerms, partition
from dist_core.partition.blocks import StageDevice
from dist_core.state.memory_limit import MemoryLimit
from dist_core.trial.chosen_layout import ChosenLayout
from tests.dist_core.larger.test_alike import Masked

WIDTH, DEPTH = 64, 12
BOTH = (False, True)


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))


def terms(sizes: tuple[int, ...] = (1, 2, 4), **options: Any) -> dict[str, LayoutTerms]:
    model = stack()
    optimizer = torch.optim.Adam(model.parameters())
    costs = model_costs(model, blocks_of(model), [optimizer], torch.zeros(8, WIDTH))
    found = predicted_terms(costs, sizes, ("sharded", "stages"), BOTH, **options)
    return {str(each.layout): each for each in found}


def test_memory_is_divided_by_layouts() -> None:
    found = terms()
    whole = sum(each.nbytes for each in stack().parameters())
    assert found["1"].fixed_bytes == 4 * whole
    assert found["4 stages"].fixed_bytes == pytest.approx(whole)
    # Two blocks' weights are whole for as long as they are used.
    assert found["4 sharded"].fixed_bytes == pytest.approx(whole + 2 * whole / DEPTH)
    assert found["4 sharded"].example_bytes == found["1"].example_bytes
    # Early stages keep the activations of as many microbatches as there are stages behind.
    assert found["4 stages"].example_bytes == pytest.approx(found["1"].example_bytes / 4 * 4 / 16)
    for name in ("1", "2 stages", "4 sharded"):
        assert found[f"{name} recomputed"].example_bytes < found[name].example_bytes
    for name in ("1", "2 stages"):
        assert found[f"{name} recomputed"].seconds == pytest.approx(found[name].seconds * 4 / 3)


def test_stages_wait_for_each_other_and_shards_for_weights() -> None:
    found = terms()
    assert found["2 stages"].seconds / found["1"].seconds == pytest.approx(0.5 * (1 + 1 / 8))
    assert found["4 stages"].seconds / found["1"].seconds == pytest.approx(0.25 * (1 + 3 / 16))
    assert terms(microbatches=64)["4 stages"].seconds < found["4 stages"].seconds
    assert found["2 sharded"].seconds > found["1"].seconds


def test_what_cannot_be_cut_is_not_offered() -> None:
    assert "16 stages" not in terms((1, 16))
    assert "16 sharded" in terms((1, 16))


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    model = stack()
    for block in list(model)[1:]:
        block.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    costs = model_costs(model, blocks_of(model), [torch.optim.Adam(trained)], torch.zeros(8, WIDTH))
    [whole] = predicted_terms(costs, (1,), (), (False,))
    own = sum(each.nbytes for each in trained)
    assert whole.fixed_bytes == pytest.approx(4 * own + sum(each.nbytes for each in model.parameters()) - own)


def test_stages_that_are_said_to_fit_can_be_cut() -> None:
    """Whatever the size of the example, and where activations are computed again."""
    model = stack()
    optimizer = torch.optim.Adam(model.parameters())
    whole = sum(each.nbytes for each in model.parameters())
    for examples in (1, 8, 512):
        costs = model_costs(model, blocks_of(model), [optimizer], torch.zeros(examples, WIDTH))
        for again in BOTH:
            # A little more than the weights of a half, their gradients and state.
            room = 4 * whole / 2 + 20_000
            [found] = [
                each
                for each in predicted_terms(costs, (2,), ("stages",), (again,), memory=room)
                if each.layout.kind == "stages"
            ]
            assert found.fits(room)
            terms = PipelineTerms(microbatches=8, state_factor=costs.state_factor)
            blocks = in_memory(costs, recomputes=again)
            made = cut(model, blocks_of(model), 2, terms, costs=blocks, cuts=None, memory_bytes=room)
            largest = largest_microbatch(made, terms, room)
            assert largest is not None and largest >= 1


def test_without_an_example_the_weights_alone_are_known() -> None:
    model = stack()
    costs = model_costs(model, (), [torch.optim.SGD(model.parameters(), lr=0.1)], None)
    [whole, divided] = predicted_terms(costs, (1, 2), ("sharded",), (False,))
    assert whole.fixed_bytes == 2 * sum(each.nbytes for each in model.parameters())
    assert whole.example_bytes == divided.example_bytes == 0


def test_a_slots_memory_is_what_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SLOT_MEMORY, raising=False)
    assert slot_memory(torch.device("cpu"), 1.0) is None
    monkeypatch.setenv(SLOT_MEMORY, "4e9")
    assert slot_memory(torch.device("cpu"), 1.0) == pytest.approx(3.6e9)


def test_microbatches_are_as_small_as_memory_wants_them() -> None:
    model = stack()
    costs = model_costs(model, blocks_of(model), [torch.optim.Adam(model.parameters())], torch.zeros(8, WIDTH))
    pipeline = PipelineTerms(microbatches=8)
    found = partition(in_memory(costs, recomputes=False), [StageDevice(), StageDevice()], pipeline)
    half = sum(block.parameter_bytes for block in costs.blocks[: DEPTH // 2])
    an_example = sum(block.activation_bytes for block in found.stages[0].blocks)
    # The first of two stages keeps two microbatches.
    assert largest_microbatch(found, pipeline, 4 * half + 2 * 5.5 * an_example) == 5
    assert largest_microbatch(found, pipeline, 0.0) == 1
    assert largest_microbatch(found, pipeline, float("inf")) is None


def test_recomputed_blocks_have_the_same_gradients_with_the_same_dropout() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    x = torch.randn(16, 8)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(2)
        model.zero_grad()
        model(x).square().mean().backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    before = gradients()
    recompute_in(model, ["0", "1", "2", "elsewhere"])
    assert not isinstance(model[0].forward, MethodType)
    for mine, kept in zip(gradients(), before, strict=True):
        torch.testing.assert_close(mine, kept)
    with torch.no_grad():
        assert not model(x).requires_grad
    normed = nn.Sequential(nn.BatchNorm1d(8))
    recompute_in(normed, ["0"])
    assert isinstance(normed[0].forward, MethodType), "it would count the batch twice"


# ---------------------------------------------------------------------- which one it takes


@contextmanager
def somebody_who_hears(told: list[tuple[str, Any]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"null")

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def an_environment(url: str, layout: str, folder: Path, sizes: tuple[int, ...] = (1, 2, 4)) -> ReplicaEnvironment:
    return ReplicaEnvironment(
        api_url=url,
        token="t",
        trial_id="t",
        replica_id="t-0",
        launch_index=0,
        checkpoint_dir=folder,
        node="n",
        slot=0,
        members=Layout.from_name(layout).slots,
        layout=layout,
        replica_sizes=sizes,
    )


TERMS = (
    LayoutTerms(Layout(1), 1.0, 80e6, 1e6),
    LayoutTerms(Layout(2, "sharded"), 1.1, 45e6, 1e6),
    LayoutTerms(Layout(2, "stages"), 0.6, 40e6, 2e6),
    LayoutTerms(Layout(4, "stages"), 0.4, 20e6, 2e6),
)


def chosen(environment: ReplicaEnvironment, folder: Path) -> ChosenLayout:
    return ChosenLayout(environment, ControlChannel(environment), MemoryLimit(folder), environment.members)


def test_it_takes_the_one_that_was_chosen_or_the_fastest_of_its_size(tmp_path: Path) -> None:
    for asked, found in (("2", "2 stages"), ("2 sharded", "2 sharded"), ("4", "4 stages")):
        mine = chosen(an_environment("http://127.0.0.1:9", asked, tmp_path), tmp_path)
        assert str(mine.settle(TERMS, 50e6, whole_seconds=1.0)) == found
        assert mine.name == found and mine.terms == TERMS
    # Divided without need, it trains until the scheduler has a slot's worth for it.
    assert str(mine.settle(TERMS, None, whole_seconds=1.0)) == "4 stages"


def test_one_that_does_not_fit_says_what_does_and_leaves(tmp_path: Path) -> None:
    told: list[tuple[str, Any]] = []
    with somebody_who_hears(told) as url:
        mine = chosen(an_environment(url, "1", tmp_path), tmp_path)
        with pytest.raises(ReplicaExit) as left:
            mine.settle(TERMS, 50e6, whole_seconds=1.0)
    assert left.value.code == 143
    (_, warning), (path, hints) = told
    assert "the model as 1 needs 81 MB on a slot, which has 50 MB" in warning["message"]
    assert "asks for 4 stages, or another layout that fits" in warning["message"]
    assert path == "/replica/hints"
    assert Hints.from_json(hints["hints"]) == Hints(bounds=None, layout="1", layouts=TERMS, slot_memory_bytes=50e6)


def test_one_that_fits_nowhere_is_refused_in_one_sentence(tmp_path: Path) -> None:
    mine = chosen(an_environment("http://127.0.0.1:9", "1", tmp_path), tmp_path)
    with pytest.raises(
        InvalidTraining, match=r"needs at least 22 MB on each slot of a replica \(4 stages\), and a slot"
    ):
        mine.settle(TERMS, 10e6, whole_seconds=1.0)
    with pytest.raises(InvalidTraining, match="cannot be divided among the 1 slots"):
        mine.settle(TERMS[1:], 50e6, whole_seconds=1.0)


def test_without_a_choice_only_weights_that_cannot_fit_are_refused() -> None:
    alone = ChosenLayout(None, None, MemoryLimit(None), 1)
    roomy = replace(TERMS[0], example_bytes=1e12)
    assert alone.settle([roomy], 90e6, whole_seconds=1.0) == Layout(1)
    assert alone.name == "" and alone.terms == ()
    with pytest.raises(InvalidTraining, match="make the model smaller"):
        alone.settle([roomy], 50e6, whole_seconds=1.0)


def test_a_layout_that_ran_out_of_memory_is_given_up(tmp_path: Path) -> None:
    told: list[tuple[str, Any]] = []
    with somebody_who_hears(told) as url:
        mine = chosen(an_environment(url, "2 stages", tmp_path), tmp_path)
        mine.settle(TERMS, 50e6, whole_seconds=1.0)
        assert mine.give_up()
        assert {str(each.layout) for each in mine.terms} == {"1", "2 sharded", "4 stages"}
        assert [each[0] for each in told] == ["/replica/warning", "/replica/hints"]
        assert len(told[1][1]["hints"]["layouts"]) == 3
        # Whoever is started with it again does not try.
        again = chosen(an_environment(url, "2 stages", tmp_path), tmp_path)
        with pytest.raises(ReplicaExit):
            again.settle(TERMS, 50e6, whole_seconds=1.0)
    only = chosen(an_environment("http://127.0.0.1:9", "4 stages", tmp_path), tmp_path)
    only.settle(TERMS[3:], 50e6, whole_seconds=1.0)
    assert not only.give_up(), "there is no other"


def test_what_memory_has_taught_is_kept_by_layout(tmp_path: Path) -> None:
    limit = MemoryLimit(tmp_path)
    limit.layout = "2 stages"
    assert limit.lower(100, 8) == 75
    assert MemoryLimit(tmp_path).most_examples is None
    limit.layout = ""
    assert limit.lower(10, 8) == 8
    other = MemoryLimit(tmp_path)
    assert other.most_examples == 8
    other.layout = "2 stages"
    assert other.most_examples == 75
    # As earlier versions wrote it.
    (tmp_path / "memory-limit.json").write_text('{"max_atomic": 12}')
    assert MemoryLimit(tmp_path).most_examples == 12


def test_stages_that_would_not_compute_the_model_are_not_offered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, example = Masked(), torch.randn(2, 4)
    choice = chosen(an_environment("http://127.0.0.1:1", "1", tmp_path), tmp_path)
    assert kinds_that_train(choice, model, ("sharded", "stages"), None, example) == ["sharded"]
    assert "this model is not divided into stages: the pipeline stages of Masked do not compute" in caplog.text
    without = chosen(an_environment("http://127.0.0.1:1", "2", tmp_path, (2,)), tmp_path)
    assert kinds_that_train(without, model, ("stages",), None, example) == ("stages",)


def test_layouts_that_do_not_exist_are_refused() -> None:
    model = stack()
    with pytest.raises(InvalidTraining, match="must contain 'sharded', 'stages' or both"):
        ElasticModel(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.functional.mse_loss,
            example=torch.zeros(2, WIDTH),
            layouts=["sliced"],
        )
