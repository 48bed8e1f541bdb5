"""Lists the checkpoints of a folder, reading again only those that changed since the last time.

The Coordinator looks four times a second, and a run that keeps its checkpoints has hundreds: to read every manifest
each time took 40 % of a core with 1,000 of them.
"""

from __future__ import annotations

from pathlib import Path

from launcher.base.errors import CheckpointError
from launcher.checkpoints.checkpoint_folder import Checkpoint, CheckpointName, CheckpointState, read_checkpoint
from launcher.checkpoints.manifest import MANIFEST_NAME

SETTLED_S = 2.0
"""A folder that was changed so long before it was read has other times where it is changed again; one that is younger
may not, as file systems count time in ticks."""


Stamp = tuple[int, ...]
"""What a folder and its manifest looked like: their times first. A mark that is given or taken changes the folder."""


def _stamp_of(path: Path) -> Stamp | None:
    try:
        folder, manifest = path.stat(), (path / MANIFEST_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    times = (folder.st_mtime_ns, folder.st_ctime_ns, manifest.st_mtime_ns, manifest.st_ctime_ns)
    return (*times, folder.st_ino, manifest.st_ino, manifest.st_size)


class Listing:
    """For one thread at a time to change; of two, the later one's knowledge stays."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, Checkpoint]] = {}

    def read(self, root: Path, now: float) -> tuple[Checkpoint, ...]:
        """All below `root`, the newest last; none where there is no such folder. `now`: unix seconds.

        Raises CheckpointError where it can't be read: that is not the same as none.
        """
        known: dict[Path, tuple[Stamp, Checkpoint]] = {}
        found = []
        try:
            for path in root.iterdir():
                stamp = _stamp_of(path)
                was, one = self._known.get(path, (None, None))
                if one is None or was != stamp:
                    name = CheckpointName.parse(path.name.partition(".")[0])
                    if name is None or not path.is_dir():
                        continue
                    one = read_checkpoint(path, name)
                    if not path.is_dir():
                        continue  # a live run prunes while others read: what is gone by now was not damaged
                found.append(one)
                if stamp and one.state is CheckpointState.COMMITTED and max(stamp[:4]) < (now - SETTLED_S) * 1e9:
                    known[path] = stamp, one
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not root.exists():
                return ()
            raise CheckpointError(
                f"{root} can't be listed: {error.strerror or error}", "check cluster.fileroot"
            ) from error
        self._known = known
        return tuple(sorted(found, key=lambda one: (one.name, one.path)))


def list_folder(root: Path) -> tuple[Checkpoint, ...]:
    """As `Listing.read`, once."""
    return Listing().read(root, 0.0)
