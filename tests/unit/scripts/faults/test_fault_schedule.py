"""Which fault comes when: the words, the storm, the decision."""

import ast
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from scripts.faults import declaration
from scripts.faults.kinds import KINDS, LETTERS, OUT_OF_REACH, code_place, describe
from scripts.faults.schedule import Copies, FaultChoice, FaultMoment, decide, in_order, last_copy, parse_fault, storm
from scripts.faults.trainer_faults import FRAMES

ACTORS = Path(__file__).parents[4] / "actors"
CODE = re.compile(rf"[{LETTERS.removesuffix('X')}][1-9]\d?|X-[a-z]+")


def test_a_fault_is_read_with_its_options_and_its_time():
    fault = parse_fault("C1:part=http,server=0@30")
    assert (fault.kind.id, fault.at_step, fault.after_s) == ("C1", 30, None)
    assert fault.options == {"part": "http", "server": 0.0}
    assert parse_fault("C2:seconds=20@+60").after_s == 60.0
    assert not parse_fault("X-gc").is_scheduled


@given(st.sampled_from([k for k in KINDS.values() if not k.out_of_reach]), st.integers(0, 9999), st.sampled_from("s@"))
def test_what_is_printed_reads_back_as_the_same_fault(kind, when, way):
    fault = parse_fault(f"{kind.id}@{when}" if way == "@" else f"{kind.id}@+{when}")
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("C100", "not a fault"),
        ("C99", "'C99' is no kind"),
        ("Z1", "'Z1' is no kind"),
        ("C1:prat=http", "no option 'prat'"),
        ("C1:part=engine", "part=engine is none of"),
        ("X-gc:seconds=soon", "seconds=soon is not a number"),
        ("X-gc:seconds=0.05", "seconds=0.05 is less than"),
        ("X-gc:seconds=inf", "seconds=inf"),
        ("C1@3.5", "@3.5 is no time"),
        ("C1x3", "belongs into a storm"),
        ("S4", "S4 can't be injected"),
        ("X-hard", "X-hard can't be injected"),
    ],
)
def test_a_fault_that_makes_no_sense_is_named(text, named):
    with pytest.raises(UsageError, match=named.replace("'", ".")):
        parse_fault(text)


def test_every_kind_that_is_within_reach_can_be_injected_and_no_other():
    assert all((kind.inject is None) is bool(kind.out_of_reach) for kind in KINDS.values())
    assert all(kind in describe() for kind in KINDS)


def test_a_code_is_a_letter_with_a_number_or_a_trap_with_a_word_and_names_one_kind():
    assert len(KINDS) > 20
    assert [code for code in KINDS if not CODE.fullmatch(code)] == []
    assert len(KINDS) == len(declaration.KINDS) + len(OUT_OF_REACH)
    with pytest.raises(ValueError, match="C1 is declared twice"):
        declaration.fault("C1", "another fault")(lambda context: {})


def test_kinds_are_listed_by_letter_and_number():
    codes = ["X-gc", "C10", "T1", "C9", "S1", "C1", "N10", "N2", "X-ape"]
    assert sorted(codes, key=code_place) == ["C1", "C9", "C10", "T1", "S1", "N2", "N10", "X-ape", "X-gc"]


STORM = "C1x3 C2:seconds=2x2 C7 T1x2 M1×2 C5 T3"


@given(st.integers(0, 2**32), st.integers(0, 50), st.integers(12, 500))
def test_a_storm_has_all_its_faults_at_steps_of_their_own_within_its_range(seed, first, length):
    faults = storm(STORM, first_step=first, last_step=first + length - 1, seed=seed)
    kinds = sorted(fault.kind.id for fault in faults)
    assert kinds == sorted(["C1"] * 3 + ["C2"] * 2 + ["C7"] + ["T1"] * 2 + ["M1"] * 2 + ["C5", "T3"])
    steps = [fault.at_step for fault in faults]
    assert steps == sorted(set(steps))
    assert first <= steps[0]
    assert steps[-1] < first + length


def test_a_storm_is_its_seed():
    first = storm(STORM, first_step=10, last_step=90, seed=7)
    assert first == storm(STORM, first_step=10, last_step=90, seed=7)
    assert any(storm(STORM, first_step=10, last_step=90, seed=seed) != first for seed in range(3))


@pytest.mark.parametrize(("text", "first", "last"), [("C1x3", 5, 6), ("C1", 6, 5), ("C1@3", 0, 9)])
def test_a_storm_that_has_no_room_or_names_steps_is_refused(text, first, last):
    with pytest.raises(UsageError):
        storm(text, first_step=first, last_step=last, seed=1)


def test_what_comes_at_once_comes_first():
    texts = ["C1@30", "C2@+60", "C5", "C7@10", "T1@+5"]
    random.Random(1).shuffle(texts)
    assert [str(fault)[:2] for fault in in_order([parse_fault(text) for text in texts])] == [
        "C5",
        "T1",
        "C2",
        "C7",
        "C1",
    ]


DUE, LATER, NOW = parse_fault("T1@10"), parse_fault("T1@+60"), parse_fault("T1")


@pytest.mark.parametrize(
    ("fault", "moment", "due_for_s", "choice"),
    [
        (DUE, FaultMoment(elapsed_s=0, step=None), 0, FaultChoice.WAIT),
        (DUE, FaultMoment(elapsed_s=0, step=9), 0, FaultChoice.WAIT),
        (DUE, FaultMoment(elapsed_s=0, step=10), 0, FaultChoice.FIRE),
        (DUE, FaultMoment(elapsed_s=0, step=10, recovering="the trainer"), 99, FaultChoice.WAIT),
        (DUE, FaultMoment(elapsed_s=0, step=10, recovering="the trainer"), 100, FaultChoice.MISS),
        (DUE, FaultMoment(elapsed_s=0, step=10, last_copy="the only one"), 99, FaultChoice.WAIT),
        (DUE, FaultMoment(elapsed_s=0, step=10, last_copy="the only one"), 100, FaultChoice.REFUSE),
        (DUE, FaultMoment(elapsed_s=0, step=3, run_is_live=False), 0, FaultChoice.MISS),
        (LATER, FaultMoment(elapsed_s=59.9, step=10), 0, FaultChoice.WAIT),
        (LATER, FaultMoment(elapsed_s=60.0, step=None), 0, FaultChoice.FIRE),
        (NOW, FaultMoment(elapsed_s=0, step=None), 0, FaultChoice.FIRE),
        (NOW, FaultMoment(elapsed_s=0, step=5, recovering="the trainer"), 0, FaultChoice.WAIT),
        (NOW, FaultMoment(elapsed_s=0, step=5, last_copy="the only one"), 0, FaultChoice.REFUSE),
    ],
)
def test_a_fault_waits_for_its_time_and_for_a_role_that_recovers(fault, moment, due_for_s, choice):
    decided, reason = decide(fault, moment, due_for_s=due_for_s, within_s=100)
    assert decided is choice
    assert reason


@pytest.mark.parametrize(
    ("kind", "checkpoints", "servers", "keep_one", "refused"),
    [
        ("T1", 0, 2, False, "no complete checkpoint"),
        ("T1", 1, 2, False, ""),
        ("T4", 1, 2, False, "would leave none"),
        ("T4", 2, 2, False, ""),
        ("T5", 0, 2, False, "no complete checkpoint"),
        ("M2", 0, 2, False, "no complete checkpoint"),
        ("C1", 0, 1, False, ""),
        ("C1", 0, 1, True, "keep-one"),
        ("C1", 0, 2, True, ""),
        ("C2", 0, 1, True, "keep-one"),
        ("C7", 0, 3, True, "keep-one"),
        ("M1", 0, 0, True, ""),
        ("S1", 0, 0, True, ""),
    ],
)
def test_the_last_copy_of_anything_is_kept(kind, checkpoints, servers, keep_one, refused):
    copies = Copies(complete_checkpoints=checkpoints, live_servers=servers)
    reason = last_copy(kind, copies, keep_one=keep_one)
    assert refused in reason
    assert bool(reason) == bool(refused)


@pytest.mark.parametrize(("moment", "function", "file"), FRAMES)
def test_the_functions_by_which_a_moment_is_recognised_are_there(moment, function, file):
    """They are known by name alone: one that is renamed would leave T1 without its moment, and say nothing."""
    (source,) = ACTORS.rglob(file)
    names = {node.name for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)}
    assert function in names, moment
