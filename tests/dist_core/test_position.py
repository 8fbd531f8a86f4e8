"""Where training stands: epochs, loops, and what a process that resumes has behind it."""

from __future__ import annotations

from dist_core.state.position import Position


def resumed(position: Position) -> Position:
    """The same in a process that begins now."""
    another = Position()
    another.load_state_dict(position.state_dict())
    return another


def stepped(position: Position, steps: int = 1, progress: float = 0.0) -> None:
    position.steps += steps
    position.own_steps += steps
    position.steps_with_gradients += steps
    position.progress += progress


def test_an_epoch_ends_with_its_progress_or_as_if_it_had() -> None:
    position = Position()
    assert position.begin_loop()
    stepped(position, progress=60.0)
    position.leave_loop()
    position.epoch_done(100)
    assert (position.epoch, position.epoch_progress) == (1, 100.0)
    stepped(position, progress=25.0)
    assert position.in_epochs(100) == 1.25
    assert position.fraction_of_epoch(100) == 0.25
    assert position.in_epochs(None) == 1.0
    assert position.fraction_of_epoch(None) == 0.0


def test_a_process_that_resumes_within_a_loop_stands_behind_what_leads_to_it() -> None:
    position = Position()
    position.begin_loop()
    position.leave_loop()
    position.begin_loop()
    position.loop_start = (2, 3)
    stepped(position)
    after = resumed(position)
    assert after.is_resumed
    # The first loop is done, and the second one is where it goes on.
    assert after.is_behind_next_loop
    assert not after.begin_loop()
    assert after.is_behind_next_loop
    assert after.begin_loop()
    assert after.in_training_loop
    assert not after.is_behind_next_loop


def test_what_comes_first_in_a_new_epoch_is_behind_nothing() -> None:
    position = Position()
    position.begin_loop()
    position.loop_start = (1, 0)
    stepped(position)
    position.leave_loop()
    position.epoch_done(10)
    after = resumed(position)
    assert after.is_resumed
    assert not after.is_behind_next_loop
    assert after.begin_loop()


def test_a_process_that_has_made_a_step_is_not_resumed() -> None:
    position = Position()
    assert not position.is_resumed
    stepped(position)
    after = resumed(position)
    assert after.is_resumed
    stepped(after)
    assert not after.is_resumed


def test_a_look_at_the_data_is_no_loop() -> None:
    position = Position()
    position.begin_loop()
    position.leave_loop_early(has_trained=False)
    assert (position.loops_begun, position.loops_done, position.in_training_loop) == (0, 0, False)


def test_a_loop_that_was_left_can_be_gone_on_with() -> None:
    position = Position()
    position.begin_loop()
    stepped(position)
    position.leave_loop_early(has_trained=True)
    assert position.loops_done == 1
    position.go_back_into_loop()
    after = resumed(position)
    assert after.begin_loop()


def test_evaluations_count_from_a_loop_that_trains() -> None:
    position = Position()
    position.has_evaluated = True
    position.begin_loop()
    assert not position.has_evaluated


def with_limit(limit: int | None, epochs: int) -> Position:
    position = Position()
    position.limit = limit
    for _ in range(epochs):
        position.epoch_done(None)
    return position


def test_after_the_last_epoch_there_is_nothing_to_save() -> None:
    assert not with_limit(None, 3).is_past_the_end
    assert not with_limit(4, 3).is_past_the_end
    assert with_limit(3, 3).is_past_the_end


def test_code_that_begins_again_knows_nothing() -> None:
    position = with_limit(3, 2)
    stepped(position)
    position.begin_run()
    assert (position.epoch, position.limit, position.steps) == (0, None, 0)
