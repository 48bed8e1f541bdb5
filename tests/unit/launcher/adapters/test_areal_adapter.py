"""AReaL: its YAML, the command, its step tables as 1.0.4 printed them, its exports and its recover folder."""

import os
from pathlib import Path

import pytest

from launcher.adapters.areal_settings import areal_settings
from launcher.adapters.trainer_adapter import adapter_of
from launcher.base.errors import ConfigError
from launcher.checkpoints.areal_folders import SUPERVISED
from launcher.run_files.run_paths import login_name
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, copied, make_areal, truncate
from tests.support.worlds.adapters import missing, trainer

SINGLE = ("scheduler.type=local",)
SAMPLE = Path(__file__).parents[1] / "diagnosis" / "data" / "areal_trainer_step.log"


def test_its_launcher_is_started_once_with_its_yaml_and_overrides_as_they_are(tmp_path):
    made = adapter_of(trainer(tmp_path, "actor.weight_update_mode=xccl", env={"WANDB_MODE": "offline"})).command(None)
    python = str(tmp_path / "venv" / "bin" / "python3")
    assert made.words[:5] == (python, "-m", "areal.infra.launcher.local", "train.py", "--config")
    assert made.words[5:] == ("their.yaml", "actor.weight_update_mode=xccl", "++recover.retries=0")
    assert made.variables["PATH"].startswith(f"{tmp_path}/venv/bin:")  # its launcher calls python3 and torchrun by name
    assert made.variables["WANDB_MODE"] == "offline"
    assert missing(trainer(tmp_path)) == []


def test_a_single_controller_is_its_script_and_lost_are_its_workers_and_servers(tmp_path):
    adapter = adapter_of(trainer(tmp_path, *SINGLE))
    made = adapter.command(None)
    python = str(tmp_path / "venv" / "bin" / "python3")
    assert made.words == (python, "train.py", "--config", "their.yaml", *SINGLE)
    assert made.variables["AREAL_SPMD_MODE"] == "0", "whatever the launcher's own environment has"
    assert adapter.source == tmp_path / "out" / "logs" / login_name() / EXPERIMENT / TRIAL / "main.log"
    assert "started as a single controller" in "\n".join(adapter.plan())
    assert adapter.is_trainer(["/venv/bin/python3", "-m", "areal.infra.rpc.rpc_server", "--role", "actor"])
    assert adapter.is_trainer(["python3", "-m", "areal.experimental.inference_service.sglang.launch_server"])
    assert not adapter.is_trainer(["stdbuf", "-oL", "python3", "-m", "areal.infra.rpc.rpc_server"])
    assert not adapter.is_trainer(["/venv/bin/python3", "train.py", "--config", "their.yaml"])
    assert not adapter.is_trainer(["python3", "-m"])
    assert missing(trainer(tmp_path, *SINGLE)) == []


@pytest.mark.parametrize(
    ("older", "said"),
    [
        ("sglang:d4p1t1+fsdp:d2", ["++rollout.backend=sglang:d4p1t1", "++actor.backend=fsdp:d2"]),
        ("vllm.d1t2+megatron.d2t2", ["++rollout.backend=vllm:d1t2", "++actor.backend=megatron:d2t2"]),
        ("sglang.d4p1t1+d4p1t1", ["++rollout.backend=sglang:d4p1t1", "++actor.backend=fsdp:d4p1t1"]),
        ("sglang:d4t8+megatron:(attn:d1p12t4|ffn:d1p12e4)", []),
    ],
)
def test_places_of_an_older_yaml_are_told_in_the_words_that_areal_reads_now(tmp_path, older, said):
    """AReaL 1.0 reads no dotted form, no trainer without its backend, and no YAML that lacks both `backend`s."""
    overrides = [f"allocation_mode='{older}'", "~rollout", "~actor.backend"]
    settings = areal_settings(trainer(tmp_path, *overrides))
    now = "+".join(place.partition("=")[2] for place in said)
    assert settings.places == (*said, *([f"allocation_mode={now}"] if said and now != older else []))
    words = adapter_of(trainer(tmp_path, *overrides)).command(None).words
    assert words[words.index(overrides[-1]) + 1 :] == (*settings.places, "++recover.retries=0")


def test_how_many_ranks_and_servers_a_dotted_form_means(tmp_path):
    settings = areal_settings(trainer(tmp_path, "allocation_mode=sglang.d3p1t2+d4p1t1", "~rollout", "~actor.backend"))
    assert settings.ranks == 4
    assert {key: settings.servers()[key] for key in ("n_servers", "tp_size")} == {"n_servers": 3, "tp_size": 2}


def test_with_our_servers_its_trainer_is_started_by_torchrun(tmp_path):
    given = trainer(tmp_path, rung="servers", addresses_env="AREAL_LLM_SERVER_ADDRS")
    adapter = adapter_of(given)
    made = adapter.command(None)
    assert made.words[1:6] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert made.words[6:9] == ("train.py", "--config", "their.yaml")
    assert made.variables["AREAL_SPMD_MODE"] == "1"
    assert adapter.source is None, "its output is this launcher's log"
    assert missing(given) == []


def test_records_of_a_trainer_that_was_killed_are_removed_before_the_next_one(tmp_path):
    root = tmp_path / "records"
    ours = {"rung": "servers", "addresses_env": "AREAL_LLM_SERVER_ADDRS"}
    overrides = (f"+cluster.name_resolve.nfs_record_root={root}", "+cluster.name_resolve.type=nfs")
    left = tmp_path / "out" / "checkpoints" / login_name() / EXPERIMENT / TRIAL / "default" / "weight_update_v3"
    left.mkdir(parents=True)
    removes = adapter_of(trainer(tmp_path, *overrides, **ours)).command(None).removes
    assert removes == (root / login_name() / EXPERIMENT / TRIAL, left)
    (refused,) = missing(trainer(tmp_path, "+cluster.name_resolve.type=etcd3", **ours))
    assert "cluster.name_resolve.type=etcd3" in refused
    assert "cluster.name_resolve.type=nfs" in refused
    assert adapter_of(trainer(tmp_path)).command(None).removes == (), "AReaL's own launcher does"


def test_where_the_yaml_does_not_say_where_records_are_it_is_told(tmp_path):
    made = adapter_of(trainer(tmp_path, rung="servers", addresses_env="AREAL_LLM_SERVER_ADDRS")).command(None)
    root = tmp_path / "out" / "name_resolve"
    assert f"++cluster.name_resolve.nfs_record_root='{root}'" in made.words
    assert made.removes == (root / login_name() / EXPERIMENT / TRIAL,)


def test_weights_that_a_restarted_server_could_not_get_are_refused(tmp_path):
    ours = {"rung": "servers", "addresses_env": "AREAL_LLM_SERVER_ADDRS"}
    (refused,) = missing(trainer(tmp_path, "actor.weight_update_mode=xccl", **ours))
    assert "their.yaml: actor.weight_update_mode=xccl" in refused
    assert "actor.weight_update_mode=disk" in refused
    assert missing(trainer(tmp_path, rung="servers")), "a variable that AReaL does not read"


def test_steps_are_read_from_its_tables_however_the_log_is_cut(tmp_path):
    sample = SAMPLE.read_text()
    sample = sample[: sample.index("╘")] + sample[sample.index("╘") :].split("\n")[0] + "\n"
    text = sample + sample.replace("Train step 2/160", "Train step 3/160").replace("1.1328e-01", "nan")
    adapter = adapter_of(trainer(tmp_path))
    seen, rest = adapter.read(text)
    assert rest == ""
    assert [(one.step, one.reward, one.total, one.nonfinite) for one in seen] == [
        (1, 0.11328, 160, ()),
        (2, None, 160, ("reward",)),
    ]
    for cut in range(0, len(text), 997):
        first, left = adapter.read(text[:cut])
        second, _ = adapter.read(left + text[cut:])
        assert [*first, *second] == seen


def test_the_recover_folder_comes_before_an_export_of_its_step_and_an_export_is_prepared(tmp_path):
    given = trainer(tmp_path)
    top, info = make_areal(tmp_path / "out", [4, 9], recover_step=9)
    adapter = adapter_of(given)
    found = adapter.checkpoints()
    own = top / "default" / "recover_checkpoint"
    assert [(one.step, one.path == own, one.is_whole, one.has_optimizer) for one in found] == [
        (4, False, True, False),
        (9, True, True, True),
        (9, False, True, False),
    ]
    assert found[1].with_it == (info,)
    assert adapter.preparation(own) is None
    prepared = adapter.preparation(found[0].path).words
    assert prepared[1:3] == ("-m", "scripts.setup_recovery")
    assert SUPERVISED in adapter.preparation(found[0].path).variables, "the run that asks is not in its way"
    assert prepared[-3:] == ("--checkpoint-path", str(found[0].path), "--force")
    assert adapter.preparation(None).words[-1] == "--undo"
    assert adapter.command(own).words == adapter.command(None).words


def test_a_recover_folder_without_an_optimizer_is_loaded_without_one(tmp_path):
    given = trainer(tmp_path)
    make_areal(tmp_path / "out", [], recover_step=9, optimizer=False)
    (found,) = adapter_of(given).checkpoints()
    assert not found.has_optimizer
    assert adapter_of(given).command(found.path).words[-1] == "++recover.no_load_optim=true"


def test_what_is_torn_is_not_whole_and_an_export_alone_is_nothing_to_resume_from(tmp_path):
    given = trainer(tmp_path)
    top, info = make_areal(tmp_path / "out", [4], recover_step=9)
    (info / "dataloader_info.pkl").unlink()
    export, own = adapter_of(given).checkpoints()
    assert not own.is_whole
    assert "dataloader_info.pkl" in own.problem
    assert export.is_whole
    assert "can't resume from an export alone" in export.no_resume
    copied(top, tmp_path / "copy")
    truncate(top / "default" / "recover_checkpoint" / ".metadata")
    assert not adapter_of(given).checkpoints()[-1].is_whole
    assert adapter_of(trainer(tmp_path, "recover.mode=disabled")).checkpoints() == []


def test_one_that_becomes_whole_within_the_tick_of_its_disks_clock_counts(tmp_path):
    given = trainer(tmp_path)
    top, info = make_areal(tmp_path / "out", [4], recover_step=9)
    last = [info / "saver_info.json", *(top / "default").glob("epoch*/tokenizer_config.json")]
    written = [file.read_bytes() for file in last]
    adapter = adapter_of(given)

    def look():
        """As on a disk whose times are whole seconds."""
        for path in (info, *info.iterdir(), *(top / "default").rglob("*")):
            os.utime(path, (1e9, 1e9))
        return [one.is_whole for one in adapter.checkpoints()]

    for file in last:
        file.unlink()
    assert look() == [False, False]
    for file, content in zip(last, written, strict=True):
        file.write_bytes(content)
    assert look() == [True, True]


def test_a_recover_folder_that_is_written_again_while_it_is_read_is_not_whole(tmp_path, monkeypatch):
    given = trainer(tmp_path)
    make_areal(tmp_path / "out", [], recover_step=9)
    read, asked = Path.read_bytes, []

    def removed_after(path):
        content = read(path)
        if path.name == ".metadata":
            asked.append(path)
            path.unlink()  # as torch does before it renames the new one
        return content

    monkeypatch.setattr(Path, "read_bytes", removed_after)
    (own,) = adapter_of(given).checkpoints()
    assert asked
    assert not own.is_whole
    assert ".metadata" in own.problem


def test_its_folders_are_below_the_one_that_it_runs_in(tmp_path):
    make_areal(tmp_path / "out", [], recover_step=9)
    (found,) = adapter_of(trainer(tmp_path, "cluster.fileroot=out")).checkpoints()
    assert found.step == 9


def test_its_rank_is_told_from_its_launcher_and_its_servers(tmp_path):
    adapter = adapter_of(trainer(tmp_path))
    assert adapter.is_trainer(["/venv/bin/python", "-u", "train.py", "--config", "their.yaml"])
    assert not adapter.is_trainer(["python3", "-m", "areal.infra.launcher.local", "train.py"])
    assert not adapter.is_trainer(["/bin/sh", "-c", "stdbuf -oL torchrun train.py --config their.yaml"])
    assert not adapter.is_trainer(["python", "/venv/bin/torchrun", "--nnodes", "1", "train.py"])


def test_it_is_done_after_its_last_step_whatever_its_exit_code(tmp_path):
    adapter = adapter_of(trainer(tmp_path))
    assert adapter.is_done(1, 7, 8)
    assert not adapter.is_done(1, 6, 8)
    assert not adapter.is_done(0, None, None)
    single = adapter_of(trainer(tmp_path, *SINGLE))
    assert single.is_done(None, 7, 8), "a worker has ended because the run is over"
    assert single.is_done(0, None, None), "nothing was left to do"
    assert not single.is_done(1, 6, 8)
    assert adapter_of(trainer(tmp_path, "total_train_steps=5")).is_done(None, 4, 8)


@pytest.mark.parametrize(
    ("overrides", "settings", "said"),
    [
        ([], {"config": None}, "trainer.config=null"),
        ([], {"config": "other.yaml"}, "is no YAML file"),
        ([], {"command": "python"}, "trainer.command=python names no script"),
        ([], {"metrics": "m.jsonl"}, "trainer.metrics is set with trainer.adapter=areal"),
        (["scheduler.type=ray"], {}, "scheduler.type=ray: its workers are not below the command"),
        (["saver.experiment_name=x"], {}, "saver.experiment_name=x, and the run's is"),
        (["scheduler.type=local", "+stats_logger.trial_name=x"], {}, "stats_logger.trial_name=x, and the run's is"),
        (["allocation_mode=null"], {}, "scheduler.type=null and allocation_mode=null: AReaL can't be started so"),
        (["allocation_mode=null", "scheduler.type=local", "actor.backend=null"], {}, "actor.backend has no value"),
        (["experiment_name=null"], {}, "experiment_name has no value"),
        (["cluster.fileroot=${oc.env:NOT_THERE_AT_ALL}"], {}, "NOT_THERE_AT_ALL"),
        (["cluster.n_nodes=2"], {}, "cluster.n_nodes=2"),
        (["actor.lr=1"], {}, "actor.lr"),
    ],
)
def test_what_can_not_be_used_is_refused_with_its_key(tmp_path, overrides, settings, said):
    with pytest.raises(ConfigError) as caught:
        adapter_of(trainer(tmp_path, *overrides, **settings))
    assert said in str(caught.value)


def test_what_is_missing_is_told_with_its_key(tmp_path, monkeypatch):
    given = trainer(tmp_path)
    site = tmp_path / "venv/lib/python3.11/site-packages"
    (site / "areal/infra/launcher/local.py").unlink()
    (site / "areal-1.0.4.dist-info").rename(site / "areal-0.5.3.dist-info")
    (tmp_path / "train.py").unlink()
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "127.0.0.1:1")
    said = missing(given)
    told = ("AReaL 0.5.3 there is older than 1.0", "train.py is no file", "is set")
    assert all(words in line for words, line in zip(told, said, strict=True))
    (tmp_path / "venv/lib/python3.11/site-packages/areal-0.5.3.dist-info").rmdir()
    assert "no AReaL is installed" in missing(given)[0]
    assert "can't be run here" in missing(trainer(tmp_path, python=str(tmp_path / "none")))[0]


def test_a_version_that_was_not_run_is_told(tmp_path):
    given = trainer(tmp_path)
    assert not [line for line in adapter_of(given).plan() if "was not run" in line]
    site = tmp_path / "venv/lib/python3.11/site-packages"
    (site / "areal-1.0.4.dist-info").rename(site / "areal-2.0.0.dist-info")
    (note,) = [line for line in adapter_of(given).plan() if "was not run" in line]
    assert note == "note: AReaL 2.0.0 was not run under this launcher; 1.0 was"


def test_looking_makes_nothing(tmp_path):
    adapter = adapter_of(trainer(tmp_path))
    assert adapter.checkpoints() == []
    assert missing(trainer(tmp_path)) == []
    assert [*adapter.plan()]
    assert not (tmp_path / "out").exists()
    assert adapter.source == tmp_path / "out" / "logs" / login_name() / EXPERIMENT / TRIAL / "trainer.log"
