"""Checkpoints at a URL (s3://, gs://, file://, anything fsspec supports): copied, listed, fetched, verified, removed.

    {url}/{experiment_name}/{trial_name}/{checkpoint}/…files…      the manifest last; taken away first

So what a kill leaves half copied, or half removed, has no manifest, and is no checkpoint. Nothing of what lies there is
believed: a fetched one is compared with its manifest, byte for byte, before it gets its name on this disk.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import fsspec

from launcher.base.errors import CheckpointError, ConfigError
from launcher.checkpoints.checkpoint_folder import Checkpoint, CheckpointName, CheckpointState
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.manifest import FAULT_HINT, KEEP_MARK, MANIFEST_NAME, Manifest, find_faults

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Where a name needs no folder before it; asked to make one, some would make a bucket."""

SECRET = ("KEY", "SECRET", "TOKEN", "PASSWORD", "CREDENTIAL")
"""Parts of the names of environment variables whose values are never shown."""

LONGEST_REASON = 300


class NotWanted(Exception):
    """What was being copied is not to be there any more."""


class RemoteStore:
    """Of one run. Raises ConfigError where the URL can't be used at all, CheckpointError where an operation fails."""

    def __init__(self, url: str, *, experiment_name: str, trial_name: str) -> None:
        self.where = f"{url.rstrip('/')}/{experiment_name}/{trial_name}"
        self._protocol = urlsplit(url).scheme
        try:
            self._fs, root = fsspec.core.url_to_fs(self.where, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise ConfigError(
                f"recover.url={url}: {error}",
                "install it beside this package: pip install -e .[s3] for s3://, gcsfs for gs://, adlfs for abfs://",
            ) from error
        except Exception as error:  # whatever that protocol raises for what it does not understand
            raise ConfigError(
                f"recover.url={url} can't be used: {without_secrets(error)}", "change recover.url"
            ) from error
        self._root = str(root).rstrip("/")

    def check(self) -> None:
        """Write there, read it, and remove it. Raises ConfigError naming the key, before anything is started."""
        probe, data = f"{self._root}/.probe-{secrets.token_hex(4)}", secrets.token_bytes(16)
        try:
            self._make_folder(self._root)
            self._fs.pipe_file(probe, data)
            found = self._fs.cat_file(probe)
            self._fs.rm_file(probe)
        except Exception as error:  # each protocol has its own for "no such bucket", "denied", "nobody there"
            raise ConfigError(
                f"recover.url: {self.where} can't be written, read and removed from: {without_secrets(error)}",
                "check the URL, that the bucket is there, and the credentials in the environment or their usual files",
            ) from error
        if found != data:
            raise ConfigError(f"recover.url: {self.where} does not return what was written", "use another place")

    def list(self) -> tuple[Checkpoint, ...]:
        """All that have a complete manifest, the newest last."""
        with self._reporting("can't be listed"):
            try:
                paths = [str(path) for path in self._fs.ls(self._root, detail=False)]
            except FileNotFoundError:
                return ()
            names = [CheckpointName.parse(path.rstrip("/").rpartition("/")[2]) for path in paths]
            found = [self._read(name) for name in names if name is not None]
        return tuple(sorted((one for one in found if one is not None), key=lambda one: one.name))

    def _read(self, name: CheckpointName) -> Checkpoint | None:
        try:
            manifest = Manifest.decode(self._fs.cat_file(self._at(name, MANIFEST_NAME)))
        except (FileNotFoundError, ValueError):
            return None
        if manifest.global_step != name.global_step:
            return None
        return Checkpoint(
            path=Path(self._at(name, "")),
            name=name,
            state=CheckpointState.COMMITTED,
            manifest=manifest,
            keep=bool(self._fs.exists(self._at(name, KEEP_MARK))),
        )

    def upload(self, checkpoint: Checkpoint, *, is_wanted: Callable[[], bool]) -> None:
        """Copy a committed checkpoint; the manifest last. Raises NotWanted where it went while it was copied."""
        manifest, name = checkpoint.manifest, checkpoint.name
        assert manifest is not None, "only committed ones are copied"
        self.remove(name)  # an earlier copy under this name is of another branch, or half
        with self._reporting(f"did not take {name}"):
            for file, record in manifest.files.items():
                target = self._at(name, file)
                self._make_folder(target.rpartition("/")[0])
                try:
                    self._fs.put_file(str(checkpoint.path / file), target)
                except FileNotFoundError:
                    if is_wanted():
                        raise
                if not is_wanted():
                    raise NotWanted(str(name))
                size = self._fs.info(target)["size"]
                if size != record.bytes:
                    raise CheckpointError(f"{target} has {size} bytes there, {record.bytes} here")
            if checkpoint.keep:
                self._fs.pipe_file(self._at(name, KEEP_MARK), b"")
            self._fs.pipe_file(self._at(name, MANIFEST_NAME), manifest.encode())

    def fetch(self, remote: Checkpoint, store: CheckpointStore) -> Checkpoint:
        """Put a copy into a store on this disk, after all of it was verified. Raises CheckpointError with the fault."""
        manifest = remote.manifest
        assert manifest is not None, "only committed ones are copied"
        with store.staging(remote.name) as staged:
            with self._reporting(f"does not give {remote.name}"):
                for file in remote.files:
                    (staged / file).parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(self._at(remote.name, file), str(staged / file))
            if faults := find_faults(staged, remote.files):
                raise CheckpointError(faults[0].text, FAULT_HINT)
            return store.commit(
                staged,
                files=manifest.files,
                global_step=manifest.global_step,
                policy_version=manifest.policy_version,
                config_fingerprint=manifest.config_fingerprint,
                health=manifest.health,
                keep=remote.keep,
            )

    def remove(self, name: CheckpointName) -> None:
        """The manifest first: from then on it is no checkpoint, whatever is left of it."""
        with self._reporting(f"does not let go of {name}"):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name, MANIFEST_NAME))
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._at(name, ""), recursive=True)

    def _at(self, name: CheckpointName, file: str) -> str:
        return f"{self._root}/{name}/{file}".rstrip("/")

    def _make_folder(self, path: str) -> None:
        if self._protocol not in OBJECT_STORES:
            self._fs.makedirs(path, exist_ok=True)

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, NotWanted):
            raise
        except Exception as error:  # each protocol raises its own; none may end a run
            raise CheckpointError(f"{self.where} {what}: {without_secrets(error)}", "it is tried again") from error


def without_secrets(error: BaseException, environment: dict[str, str] | None = None) -> str:
    """What an error says, without the value of any key that the environment holds."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for name, value in (dict(os.environ) if environment is None else environment).items():
        if len(value) >= 4 and any(part in name.upper() for part in SECRET):
            text = text.replace(value, "(not shown)")
    return text[:LONGEST_REASON]
