"""The audit that says "nothing lost" is shown losses: files of a run, each with one thing wrong in it."""

import random
import shutil

import pytest

from actors.data.run_order import read_prompt_order
from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import current_lines, read_lines
from tests.support.made_ledger import TRAIN, MadeRun

STRANGER = "0123456789abcdef"
UNFINISHED = "80 of 160 prompts once; the epoch was not finished: 80 prompts were not reached; 5 steps"
SHOWN = "160 prompts, each exactly 12 times; 120 of 120 steps"


def audited(run):
    return read_facts(run.paths, order=read_prompt_order(run.paths)).audit


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """12 epochs of 160 prompts, with rejected batches, failed prompts and restores, FINISHED."""
    run = MadeRun(tmp_path_factory.mktemp("whole"), faults=3)
    run.take_steps(120)
    run.finish()
    run.change(run.paths.ledger, current_lines)
    run.change(run.paths.metrics, current_lines)
    return run


@pytest.fixture
def run(whole, tmp_path):
    copy = object.__new__(MadeRun)
    copy.paths = type(whole.paths)(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    shutil.copytree(whole.paths.fileroot, tmp_path, dirs_exist_ok=True)
    return copy


@pytest.mark.parametrize("seed", range(6))
def test_a_sound_run_has_no_problem_whatever_failed(tmp_path, seed):
    run = MadeRun(tmp_path, faults=seed)
    run.take_steps(120)
    run.finish()
    found = audited(run)
    assert (found.problems, found.not_known, found.counts) == ((), (), SHOWN)
    assert found.loss_known_until == 119
    assert (found.taken_back > 0) is (seed > 0)


def test_a_run_that_goes_on_has_no_problem_wherever_it_is(tmp_path):
    run = MadeRun(tmp_path, faults=2)
    for steps in (1, 6, 7, 10, 13, 39, 40, 41, 58):
        run.take_steps(steps)
        found = audited(run)
        assert (found.problems, found.total_steps) == ((), None)
    run.finish("aborted")
    found = audited(run)
    assert (found.problems, found.not_known) == ((), ())
    assert found.counts == "160 prompts: 32 of them 5 times, 128 of them 6 times; 58 steps"


def test_prompts_that_were_not_used_yet_are_counted_too(tmp_path):
    run = MadeRun(tmp_path)
    run.take_steps(5)
    assert audited(run).counts == UNFINISHED
    run.take_steps(15)
    assert audited(run).counts == "160 prompts: 80 of them once, 80 of them twice; 15 steps"


def test_the_step_and_the_checkpoint_that_are_being_written_are_left_out(tmp_path):
    run = MadeRun(tmp_path)
    run.take_steps(30)
    ledger, metrics = ([*read_lines(file)] for file in (run.paths.ledger, run.paths.metrics))
    run.change(run.paths.metrics, lambda lines: lines[:29])
    assert (audited(run).problems, audited(run).steps) == ((), 29)
    run.change(run.paths.metrics, lambda lines: metrics)
    run.change(run.paths.ledger, lambda lines: lines[:28])
    assert (audited(run).problems, audited(run).steps) == ((), 28)
    run.finish("errored")
    assert "the ledger ends with step 27, the checkpoint with step 29" in audited(run).problems
    run.change(run.paths.ledger, lambda lines: ledger)
    assert audited(run).problems == ()


# ── ways in which a ledger may be wrong, each by its name ──


def each_line(change):
    return lambda lines: [line | change(line) for line in lines]


def of_line(at, change):
    return lambda lines: [line | change(line) if n == at else line for n, line in enumerate(lines)]


def without(at):
    return lambda lines: [line for n, line in enumerate(lines) if n != at]


def without_key(at, key):
    return lambda lines: [{name: line[name] for name in line if n != at or name != key} for n, line in enumerate(lines)]


def one_less(line):
    return {"prompt_ids": line["prompt_ids"][1:]}


def with_prompt(prompt):
    return lambda line: {"prompt_ids": [prompt, *line["prompt_ids"][1:]]}


def of_the_same_epoch(lines):
    return of_line(53, with_prompt(lines[56]["prompt_ids"][0]))(lines)


def twice_in_its_epoch(lines):
    return of_line(56, lambda line: {"prompt_ids": [*line["prompt_ids"], lines[53]["prompt_ids"][0]]})(lines)


def epoch_2_in_the_place_of_epoch_3(lines):
    return [line | {"prompt_ids": lines[n - 10 * (30 <= n < 40)]["prompt_ids"]} for n, line in enumerate(lines)]


def two_epochs_exchanged(lines):
    places = [*range(20), *range(30, 40), *range(20, 30), *range(40, 120)]
    return [line | {"prompt_ids": lines[places[n]]["prompt_ids"]} for n, line in enumerate(lines)]


LOST = "epoch 5: lost ["


# By what is done to the lines of the ledger: words of problems, and how many problems there are in all (None: any).
CHANGED_LEDGERS = {
    "of each batch a prompt": (each_line(one_less), ["epoch 0: lost [", "epoch 11: lost ["], 12),
    "of one batch a prompt": (of_line(53, one_less), [LOST], 1),
    "the last 60 lines": (
        lambda lines: lines[:60],
        [
            "the ledger ends with step 59, the checkpoint with step 119",
            "60 of the run's 120 steps",
            "metrics of steps that the ledger has not: [60, 61",
        ],
        3,
    ),
    "the last line": (
        lambda lines: lines[:-1],
        [
            "the ledger ends with step 118, the checkpoint with step 119",
            "119 of the run's 120 steps",
            "metrics of steps that the ledger has not: [119]",
        ],
        3,
    ),
    "all lines": (lambda lines: [], ["ends with step -1", "0 of the run's 120 steps", "metrics of steps"], 3),
    "a line of the middle": (
        without(57),
        ["steps never committed: [57]", "119 of the run's 120", "that the ledger has not: [57]", LOST],
        4,
    ),
    "the first line": (
        without(0),
        ["steps never committed: [0]", "119 of the run's 120", "that the ledger has not: [0]", "epoch 0: lost ["],
        4,
    ),
    "all versions": (
        each_line(lambda line: {"weight_versions": []}),
        ["step 0: tokens of other weights", "step 119: tokens of other weights"],
        120,
    ),
    "the key of versions": (without_key(57, "weight_versions"), ["step 57: tokens of other weights"], 1),
    "a version that is none": (
        of_line(57, lambda line: {"weight_versions": [57, "57"]}),
        ["step 57: tokens of other weights"],
        1,
    ),
    "the key of prompts": (without_key(57, "prompt_ids"), ["step 57: it names no prompts", LOST], 2),
    "a prompt of no data set": (
        of_line(53, with_prompt(STRANGER)),
        [f"prompts that are in no data set: ['{STRANGER}']", LOST, f"epoch 5: not its turn ['{STRANGER}']"],
        3,
    ),
    "all prompts of no data set": (
        each_line(lambda line: {"prompt_ids": [f"x{one}" for one in line["prompt_ids"]]}),
        ["prompts that are in no data set: ['x", " and 110 more"],
        None,
    ),
    "a prompt of the same epoch": (of_the_same_epoch, ["a second time in its epoch", LOST], 2),
    "a prompt twice": (twice_in_its_epoch, ["a second time in its epoch"], 1),
    "an epoch in another's place": (
        epoch_2_in_the_place_of_epoch_3,
        ["epoch 3: its prompts are in the order of epoch 2"],
        1,
    ),
    "two epochs exchanged": (
        two_epochs_exchanged,
        [
            "epoch 2: its prompts are in the order of epoch 3",
            "epoch 3: its prompts are in the order of epoch 2",
        ],
        2,
    ),
}
CHANGED_METRICS = {
    "a line of the middle": (without(57), "steps without metrics: [57]"),
    "the first line of an epoch": (without(50), "steps without metrics: [50]"),
    "the first line": (without(0), "steps without metrics: [0]"),
    "the last line": (lambda lines: lines[:-1], "steps without metrics: [119]"),
    "all lines": (lambda lines: [], "steps without metrics: [0, 1"),
    "a step too many": (
        lambda lines: [*lines, lines[-1] | {"global_step": 120}],
        "metrics of steps that the ledger has not: [120]",
    ),
    "a line twice": (lambda lines: [*lines[:58], *lines[57:]], "metrics lines that are there twice: [57]"),
}


@pytest.mark.parametrize("what", CHANGED_LEDGERS)
def test_what_is_wrong_in_the_ledger_is_named(run, what):
    change, says, in_all = CHANGED_LEDGERS[what]
    run.change(run.paths.ledger, change)
    problems = audited(run).problems
    for words in says:
        assert any(words in problem for problem in problems), problems
    assert in_all is None or len(problems) == in_all, problems


@pytest.mark.parametrize("what", CHANGED_METRICS)
def test_what_is_wrong_in_the_metrics_is_named(run, what):
    change, says = CHANGED_METRICS[what]
    run.change(run.paths.metrics, change)
    (problem,) = audited(run).problems
    assert says in problem


def test_the_lost_prompt_and_the_doubled_one_are_named(run):
    lines = [*read_lines(run.paths.ledger)]
    lost, doubled = lines[53]["prompt_ids"][0], lines[56]["prompt_ids"][0]
    run.change(run.paths.ledger, of_the_same_epoch)
    assert audited(run).problems == (
        f"step 56: prompt {doubled} a second time in its epoch",
        f"epoch 5: lost ['{lost}']",
    )
    assert (
        audited(run).counts
        == "160 prompts: 1 of them 11 times, 158 of them 12 times, 1 of them 13 times; 120 of 120 steps"
    )


def test_a_run_that_finished_before_its_last_step_is_short(run):
    run.change(
        run.paths.events, lambda lines: [one | ({"total_steps": 130} if "prompts" in one else {}) for one in lines]
    )
    assert audited(run).problems == ("120 of the run's 130 steps",)


def test_a_run_whose_files_all_end_too_early_is_short(tmp_path):
    run = MadeRun(tmp_path)
    run.take_steps(100)
    run.finish()
    assert audited(run).problems == ("100 of the run's 120 steps",)


def test_up_to_the_checkpoint_an_epoch_has_what_the_queue_has_given_out(tmp_path):
    run = MadeRun(tmp_path, faults=4)
    run.take_steps(105)
    run.finish("aborted")
    assert audited(run).problems == ()
    order = run.queue.prompt_order.ids_of(10)
    given = current_lines(read_lines(run.paths.ledger))[-1]["prompt_ids"]
    lost, early = given[0], order[-1]
    run.change(run.paths.ledger, lambda lines: [*lines[:-1], lines[-1] | {"prompt_ids": [early, *given[1:]]}])
    assert set(audited(run).problems) == {
        f"epoch 10 up to the checkpoint of step 104: lost ['{lost}']",
        f"epoch 10 up to the checkpoint of step 104: not its turn ['{early}']",
    }


def test_steps_after_the_checkpoint_may_use_what_the_queue_had_not_given_out(tmp_path):
    run = MadeRun(tmp_path, faults=4)
    run.take_steps(105)
    run.store.set_aside_after(101)
    run.finish("errored")
    assert audited(run).problems == ()
    run.change(run.paths.ledger, lambda lines: [*lines[:-1], lines[-1] | one_less(lines[-1])])
    assert audited(run).problems == (), "what a step after the checkpoint has lost, nobody knows"


# ── what is not known ──


def test_without_a_checkpoint_nobody_knows_what_is_lost_at_the_end(run):
    shutil.rmtree(run.paths.default_checkpoints)
    found = audited(run)
    assert (found.problems, found.loss_known_until) == ((), None)
    end, data = found.not_known
    assert "missing at the ledger's end: " in end
    assert "has no complete checkpoint" in end
    assert "those of the data set, in its order: the data set may have changed since" in data
    run.change(run.paths.ledger, of_line(53, one_less))
    assert audited(run).problems == ("epoch 5: 159 prompts used up, not 160",)


def test_a_checkpoint_that_can_t_be_read_is_no_evidence(run):
    newest = max(run.paths.default_checkpoints.glob("epoch*"), key=lambda one: one.stat().st_mtime)
    (newest / "position.json").write_text('{"position": {}}')
    assert "position.json can't be read: KeyError" in audited(run).not_known[0]


def test_a_data_set_that_is_another_now_is_no_evidence(run):
    run.paths.config.write_text(run.paths.config.read_text().replace("max_items: 160", "max_items: 161"))
    found = audited(run)
    assert (found.problems, found.loss_known_until is None) == ((), False)
    assert found.not_known == (
        "whether the prompts are those of the data set, in its order: the data set has changed since, or the trainer "
        "has left some of its records out",
    )
    run.change(run.paths.ledger, of_line(53, with_prompt(STRANGER)))
    assert audited(run).problems == (), "whether it was a prompt of the run is not known"
    run.change(run.paths.ledger, of_line(53, one_less))
    assert audited(run).problems == ("epoch 5: 159 prompts used up, not 160",)


def test_facts_that_did_not_read_the_data_set_say_so(run):
    assert read_facts(run.paths).audit.not_known == (
        "whether the prompts are those of the data set, in its order: the data set was not read",
    )


# ── runs of other shapes ──


def two_datasets(tmp_path):
    further = tmp_path / "further.jsonl"
    further.write_text("".join(TRAIN.read_text().splitlines(keepends=True)[1000:1041]))
    main = {"path": str(TRAIN), "max_items": 60, "weight": 0.5}
    return {"train_dataset": main, "train_datasets.more": {"path": str(further), "weight": 2.25}}


@pytest.mark.parametrize("shuffle", [True, False])
def test_of_a_mixture_each_epoch_has_its_own_prompts(tmp_path, shuffle):
    run = MadeRun(tmp_path / "run", faults=5, total_steps=80, datasets=two_datasets(tmp_path), shuffle=shuffle)
    run.take_steps(80)
    run.finish()
    found = audited(run)
    assert (found.problems, found.not_known) == ((), ())
    used = {one for line in current_lines(read_lines(run.paths.ledger)) for one in line["prompt_ids"]}
    assert any(one.startswith("more:") and one.endswith("*3") for one in used)
    lines = current_lines(read_lines(run.paths.ledger))
    not_this_time = sorted({*run.queue.prompt_order.ids} - {*run.queue.prompt_order.ids_of(2)})[0]
    lost = lines[20]["prompt_ids"][0]
    run.change(run.paths.ledger, lambda _: of_line(20, with_prompt(not_this_time))(lines))
    run.change(run.paths.metrics, current_lines)
    assert audited(run).problems == (f"epoch 2: lost ['{lost}']", f"epoch 2: not its turn ['{not_this_time}']")


def test_prompts_that_are_left_out_are_used_up_and_a_run_may_end_before_its_total(tmp_path):
    run = MadeRun(tmp_path, faults=6, leaves_out=0.3, total_steps=130)
    run.take_steps(120)
    run.finish()
    found = audited(run)
    assert (found.problems, found.not_known, found.counts) == ((), (), SHOWN)
    assert found.filtered > 100


@pytest.mark.parametrize("batch", [7, 16, 50])
def test_an_epoch_may_end_with_a_smaller_batch(tmp_path, batch):
    steps = -(-160 // batch) * 3
    run = MadeRun(tmp_path, faults=7, total_steps=steps, batch=batch)
    run.take_steps(steps)
    run.finish()
    assert audited(run).counts == f"160 prompts, each exactly 3 times; {steps} of {steps} steps"
    assert audited(run).problems == ()


def test_an_epoch_in_which_every_batch_was_rejected_at_first_is_in_no_others_order(tmp_path):
    run, draw = MadeRun(tmp_path), random.Random(1)
    for _ in range(40):
        for _ in range(draw.randrange(4)):
            run.queue.requeue(run.queue.take_prompts(draw.randrange(1, 40)))
        run.take_steps(run.position.next_step + 1)
    run.finish("aborted")
    assert audited(run).problems == ()
