"""Whatever is typed after `python -m launcher`: one message that names the word at fault, exit code 2, no traceback."""

import logging
import os
import re
import shlex
import subprocess
import sys

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

import launcher.__main__ as command_line
from launcher.config.compose import REPOSITORY, compose
from launcher.config.hydra_arguments import quoted, unreadable

CLASS_NAME = re.compile(r"\w*[A-Z]\w*(?:Exception|Error)\b|antlr|OmegaConf|lambda|mismatched|viable")
NOT_UTF8 = "caf\udce9.jsonl"


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Give the command some words; returns the message. Nothing is started, also where they are all right."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(command_line, "launch", lambda config, overrides=(): 0)
    monkeypatch.setattr(command_line, "run_sweep", lambda trials, read, command: max(0 * bool(read(t)) for t in trials))

    def give(*words: str) -> str:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["launcher", *words])
        try:
            code = command_line.main()
        except SystemExit as ended:  # argparse's
            code = ended.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert err.count("error:") == 1, err
        assert "Traceback" not in err, err
        assert not CLASS_NAME.search(err), err
        return err

    return give


OF_HYDRA = [
    ("hydra.job.num=abc", "hydra.job.num=abc: value 'abc'"),
    ("hydra.job.chdir=abc", "hydra.job.chdir=abc"),
    ("hydra.job.env_set=3", "hydra.job.env_set"),
    ("hydra.mode=FOO", "hydra.mode=FOO"),
    ("hydra.run.dir=null,x", "hydra.run.dir=null,x"),
    ("hydra.foo=1", "hydra.foo"),
    ("hydra=x", "hydra=x"),
    ("hydra/launcher=ray", "allowed: basic, trials"),
    ("hydra/sweeper=optuna", "optuna"),
    ("hydra/job_logging=colorlog", "colorlog"),
    ("hydra.searchpath=3", "hydra.searchpath"),
    ("hydra.callbacks.x._target_=a", "hydra.callbacks.x._target_"),
    ("hydra/callbacks=x", "hydra/callbacks"),
    ("~hydra", "~hydra"),
]
MALFORMED = [
    ("train_dataset.path=step=100.jsonl", "'train_dataset.path=step=100.jsonl' can't be read: = in a value"),
    ("train_dataset.path=[a", "its [ has no ]"),
    ("train_dataset.path={a", "its { has no }"),
    ("train_dataset.path=a]", "train_dataset.path=a]' can't be read: ]"),
    ("train_dataset.path=a(1).jsonl", "( )"),
    ("train_dataset.path=a#b", "#"),
    ('train_dataset.path=a"b', '"'),
    ("train_dataset.path=it's", "'"),
    ("train_dataset.path=${", "$"),
    ("train_dataset.path=é.jsonl", "é.jsonl' can't be read"),
    ("gconfig.stop=[a,[b]", "gconfig.stop=[a,[b]' can't be read as a list or mapping"),
    ("seed=int(x)", "int(…) can't be given these values"),
    ("seed=range(a,b)", "range(…)"),
    ("seed", "seed' can't be read: it has no ="),
    ("arithmetic_cpu", "write conf=arithmetic_cpu"),
    ("", "'' can't be read: it has no ="),
    ("b]", "b]' can't be read: it has no ="),
    ("=3", "=3' can't be read: nothing before the ="),
    ("+=3", "+=3' can't be read"),
    ("@=3", "@=3' can't be read"),
    ("se ed=3", "se ed is no key"),
    ("+++seed=3", "+++seed is no key"),
    ("~~seed", "~~seed is no key"),
    ("~", "~"),
    (f"train_dataset.path={NOT_UTF8}", r"train_dataset.path=caf\xe9.jsonl: character 23 of this argument is not UTF-8"),
]
KEYS_AND_VALUES = [
    ("+seed=3", "+seed: this key is there already"),
    ("~seed", "~seed: a setting can't be deleted"),
    ("~conf", "no value for actor.path"),
    ("~seed=7", "~seed: a setting can't be deleted"),
    ("~nope", "~nope"),
    ("+nope=1", "unknown key nope=1"),
    ("++actor.nope=1", "actor.nope"),
    ("seed=", "seed=: of type int"),
    ("actor=3", "actor"),
    ("a/b=c", "a/b"),
    ("a@b=c", "a@b can't be set"),
    ("conf=3", "conf can't be set"),
    ("conf=../arithmetic_cpu", "arithmetic_cpu"),
    ("valid_dataset=${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
    ("valid_dataset=${oc.env:PATH}", "valid_dataset"),
    ("train_dataset.path=${repo:a,b}${nope}", "nope"),
    ("seed=${seed}", "seed"),
    ('cluster.fileroot="~nobody-of-that-name/x"', "cluster.fileroot=~nobody-of-that-name/x"),
    ("seed=1,2", "seed=1,2: several values for one run"),
    ("seed=1,2", "for a list write 'key=[a,b]'"),
    ("chat.system_prompt=Hi, it is you", """as a text, write 'chat.system_prompt="Hi, it is you"'"""),
    ("train_dataset.path=a,b.jsonl", """as a text, write 'train_dataset.path="a,b.jsonl"'"""),
]
OPTIONS = [
    ("--config-dir=nowhere", "--config-dir: there is no folder "),
    ("--config-name=nope", "--config-name"),
    ("--config-path=/nowhere", "/nowhere"),
    ("--experimental-rerun=/nowhere", "/nowhere"),
    ("--cfg=nope", "nope"),
    ("--nonsense", "--nonsense"),
    ("--seed=3", "--seed=3: a setting has no dashes before it\n  → write seed=3"),
    ("--train_dataset.path=a b", "write 'train_dataset.path=a b'"),
    ("--conf", "--conf: a setting has no dashes before it"),
    ("--dry-run", "--dry-run: a setting has no dashes before it\n  → write dry_run=true"),
    ("num_generations=8", "set gconfig.n_samples. Every key with its default"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "said"), [*OF_HYDRA, *MALFORMED, *KEYS_AND_VALUES, *OPTIONS])
@pytest.mark.filterwarnings("ignore::UserWarning:hydra.main")  # that a rerun ignores other arguments
def test_one_message_names_the_word_at_fault(refused, word, said):
    assert said in refused("conf=arithmetic_cpu", "dry_run=false", word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("seed=abc,3", "seed=abc"),
        ("seed=", "seed="),
        ("hydra.launcher._target_=nope.Nope", "nope.Nope"),
        ("train_dataset.path=[a,b", "its [ has no ]"),
        ("nope=1,2", "nope"),
        ("seed=glob(*)", "-m without a trial"),
        ("hydra.job.num=1,2", "hydra.job.num=1,2"),
    ],
)
def test_a_sweep_too(refused, word, said):
    assert said in refused("-m", "conf=arithmetic_cpu", word)


def test_of_a_list_that_the_shell_took_apart(refused):
    assert "a list is one word for the shell: 'key=[a,b]'" in refused("conf=arithmetic_cpu", "gconfig.stop=[a,", "b]")


@pytest.mark.parametrize("name", ["PYTHONOPTIMIZE", "PYTHONDONTWRITEBYTECODE"])
def test_what_breaks_or_slows_the_processes_of_a_run_is_not_handed_on(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "2")
    monkeypatch.setattr(sys, "argv", ["launcher", "--version"])
    assert command_line.main() == 0
    assert name not in os.environ


def test_without_its_packages_it_names_the_interpreter(tmp_path):
    """`-S` takes the environment's packages away, as a python that is not the environment's has none of them."""
    command = [sys.executable, "-S", "-m", "launcher", "conf=arithmetic_cpu"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: hydra is not installed for {sys.executable}\n  → ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", ["step=100.jsonl", "a(1).jsonl", "a#b", 'a"b', "it's", "é.jsonl", "a\\", "a)"])
def test_what_the_message_tells_to_write_is_read_as_it_was_meant(value):
    told = unreadable(f"train_dataset.path={value}").hint
    (word,) = shlex.split(told.partition("write ")[2])
    assert compose(["conf=arithmetic_cpu", word]).train_dataset.path == value


@given(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])))
def test_any_text_can_be_quoted(text):
    assert OverridesParser.create().parse_override(f"a={quoted(text)}").value() == text.replace("${", "\\${")
