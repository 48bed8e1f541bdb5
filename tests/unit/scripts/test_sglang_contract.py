"""What another SGLang lacks of what we use is named, and nothing is missing in the installed one."""

import re
import zipfile

import pytest

from scripts import sglang_contract

SOURCES = sglang_contract.read_sources(sglang_contract.sglang_folder())
NEEDS = list(sglang_contract.needs())


def test_the_installed_version_has_all(capsys):
    assert sglang_contract.main([]) == 0
    assert f"{len(NEEDS)} names asked for, 0 missing" in capsys.readouterr().out


def without(need, text):
    """A source in which the name is another."""
    if need.kind in ("text", "route"):
        for name in need.name.split(" | "):
            text = text.replace(name, "other")
        return text
    name = need.name.partition("(")[0].rpartition(".")[2]
    words = {name, name.replace("_", "-")}
    return re.sub(rf"\b({'|'.join(map(re.escape, words))})\b", "other", text)


@pytest.mark.slow
def test_each_name_is_missed():
    changed = dict(SOURCES)
    for need in NEEDS:
        for path in [path for path in SOURCES if re.fullmatch(need.files, path)]:
            changed[path] = without(need, changed[path])
    assert sglang_contract.missing(changed) == NEEDS


@pytest.mark.slow
def test_other_parameters_of_a_method_that_we_replace_are_missed():
    path = "srt/layers/attention/torch_native_backend.py"
    changed = {**SOURCES, path: SOURCES[path].replace("scaling=None,", "scaling=None, window=None,")}
    assert [need.kind for need in sglang_contract.missing(changed)] == ["method"]


def test_a_wheel_is_read_and_what_it_lacks_is_shown(tmp_path, capsys):
    wheel = tmp_path / "sglang-9.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for path, text in SOURCES.items():
            made.writestr(f"sglang/{path}", text.replace('"/flush_cache"', '"/forget"'))
    assert sglang_contract.main([str(wheel)]) == 1
    said = capsys.readouterr().out
    assert "/flush_cache" in said
    assert "1 missing" in said


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "is neither a wheel nor a folder"),
        (lambda path: path.write_text("no zip"), "is neither a wheel nor a folder"),
        (lambda path: path.mkdir(), "give SGLang's wheel, or its folder `sglang`"),
    ],
)
def test_what_is_no_sglang_is_named(make, said, tmp_path, capsys):
    path = tmp_path / "it"
    make(path)
    assert sglang_contract.main([str(path)]) == 2
    assert said in capsys.readouterr().err
