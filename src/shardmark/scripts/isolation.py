"""A private view of the file systems, in which all writes go to a scratch folder (Linux).

A process enters a mount namespace whose root is made of overlays: it reads the user's files, and
what it writes, renames or removes exists in a scratch folder alone.  See overlayfs and
mount_namespaces(7), and decision 033.  Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18

SHARED = ("proc", "sys", "dev", "run")
"""Folders of the root that stay as they are: devices, files of the kernel, and sockets."""
SHARED_MEMORY = "/dev/shm"
OF_KERNEL = re.compile(
    "autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|devtmpfs|efivarfs|fusectl|hugetlbfs"
    "|mqueue|nfsd|nsfs|proc|pstore|rpc_pipefs|securityfs|selinuxfs|sysfs|tracefs"
)
"""File systems that hold no files of a user; all others are covered."""
IN_MEMORY = {"tmpfs", "ramfs"}
LARGEST_COPY_BYTES = 2**24
LAYERS = "layers"
"""File with the covered folders, a line each: line N was covered by the folder `N`."""
MOST_WRITTEN = 1000
MOST_IN_MEMORY = 200
"""Layers in memory whose files are listed; the kernel sends 253 descriptors in a message."""

_libc = ctypes.CDLL(None, use_errno=True)


class IsolationError(Exception):
    """The kernel or a container does not allow a private view of the file systems."""


def enter(upper: Path, writable: Sequence[Path]) -> dict[str, int]:
    """Give this process, and those it starts, a private view of the files.

    Writes go to `upper`, an empty folder; only those below the `writable` folders are real.  The
    process must have a single thread.  Returns descriptors of the layers in memory, which the view
    alone has, by the folders that they cover.
    Raises `IsolationError`.
    """
    folder = Path.cwd()
    try:
        mounts = _mounts()
        is_own_user = _unshare()
        _mount("none", "/", "", MS_REC | MS_PRIVATE)
        view = _View(upper, folder, is_own_user=is_own_user)
        view.build(mounts, writable)
        os.chdir(folder)
    except OSError as error:
        raise IsolationError(str(error)) from error
    return view.in_memory


def check_out(revision: str) -> None:
    """Check out a commit of the working folder's repository in this process's private view."""
    if revision:
        words = ["git", "checkout", "--quiet", "--force", "--detach", revision]
        subprocess.run(words, check=True)


def written(upper: Path, in_memory: Mapping[str, int]) -> list[Path]:
    """Return files that processes in the view wrote, at most `MOST_WRITTEN`, without caches."""
    return list(islice(_written(upper, in_memory), MOST_WRITTEN))


def _written(upper: Path, in_memory: Mapping[str, int]) -> Iterator[Path]:
    with suppress(OSError):
        for number, place in enumerate((upper / LAYERS).read_text().splitlines()):
            files = upper / str(number) / "upper"
            if place in in_memory:
                files = Path(f"/proc/self/fd/{in_memory[place]}")
            for folder, folders, names in os.walk(files):
                folders[:] = [name for name in folders if name != "__pycache__"]
                for name in sorted(names):
                    if not stat.S_ISCHR(Path(folder, name).lstat().st_mode):  # mark of a removal
                        yield place / Path(folder, name).relative_to(files)


def _call(operation: str, function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        raise IsolationError(f"{operation}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    places = [os.fsencode(value) for value in (source, target, kind, options)]
    _call(f"mount of {kind or source} at {target}", "mount", *places[:3], flags, places[3])


def _unshare() -> bool:
    """Enter a mount namespace; return True if it took a user namespace of the same user."""
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(CLONE_NEWNS) == 0:
        return False
    _call("user namespace", "unshare", CLONE_NEWNS | CLONE_NEWUSER)
    with suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _mounts() -> list[tuple[str, str]]:
    """Return mount points with their type of file system; a folder precedes those inside of it."""
    kinds: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        place = fields.split()[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        kinds[place.encode("latin-1").decode(errors="surrogateescape")] = rest.split()[0]
    return sorted(kinds.items())


def _topmost_own(folder: Path) -> Path:
    """Return the topmost folder from which on all have this user and group, or else the folder.

    The kernel cannot copy a folder of others into a layer of this user, which a write below it
    takes; a layer of its own begins below.
    """
    topmost = folder = folder.resolve()
    for path in (folder, *folder.parents):
        with suppress(OSError):
            status = path.stat()
            if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                break
            topmost = path
    return topmost


def _is_shared(place: str) -> bool:
    """Return whether the place is in a folder of the root that stays as it is."""
    top = place.split("/")[1]
    return top in SHARED and place != SHARED_MEMORY and not place.startswith(f"{SHARED_MEMORY}/")


class _View:
    """The root of a private view, which is built below the folder that receives its writes."""

    def __init__(self, upper: Path, working: Path, *, is_own_user: bool) -> None:
        self._upper, self._root, self._working = upper.resolve(), upper.resolve() / "root", working
        self._root.mkdir()
        self._is_own_user = is_own_user
        self._features = (",userxattr", "") if is_own_user else (",redirect_dir=on", "")
        self._covered: list[str] = []
        self.in_memory: dict[str, int] = {}
        self._refused: dict[str, IsolationError] = {}
        """Folders that are read-only, as no overlay is allowed over them."""

    def build(self, mounts: Sequence[tuple[str, str]], writable: Sequence[Path]) -> None:
        """Mount overlays over the folders of the root and over mounted file systems; enter it."""
        mounted = dict(mounts)
        added = {}
        if self._is_own_user:
            temporary = (Path(os.environ.get("TMPDIR", "")), Path("/var/tmp"))
            places = (self._working, Path.home(), *temporary)
            added = {str(_topmost_own(place)): "" for place in places}
        if _is_shared(str(self._working)):
            added[str(self._working)] = "tmpfs"
        mounts = sorted({**added, **mounted}.items())  # a folder covers no mount inside of it
        for entry in os.scandir("/"):
            self._add_entry_of_root(entry, covers=entry.path not in mounted)
        for place, kind in mounts:
            is_shared = _is_shared(place) and place != str(self._working)
            if is_shared and place.startswith("/run/") and kind not in IN_MEMORY:
                is_shared = bool(OF_KERNEL.fullmatch(kind))  # a disk in /run/media
            is_covered = place == "/" or place in self._covered
            if is_covered or is_shared or not os.path.lexists(self._inside(place)):
                continue
            if os.path.isfile(place):  # noqa: PTH113 - False if this user may not see it
                self._cover_file(place)
            elif os.path.isdir(place) and not OF_KERNEL.fullmatch(kind):  # noqa: PTH112
                self._cover(place, in_memory=kind in IN_MEMORY)
            else:
                self._bind(place)
        self._check_working()
        for path in writable:
            self._bind(str(path.resolve()))
        (self._upper / LAYERS).write_text("\n".join(self._covered))
        os.chroot(self._root)

    def _add_entry_of_root(self, entry: os.DirEntry[str], *, covers: bool) -> None:
        target = self._root / entry.name
        if entry.is_symlink():
            target.symlink_to(os.readlink(entry.path))  # noqa: PTH115
        elif entry.is_dir():
            target.mkdir()
            if entry.name in SHARED:
                self._bind(entry.path)
            elif covers:
                self._cover(entry.path)
        elif entry.stat().st_size <= LARGEST_COPY_BYTES:
            with suppress(OSError):  # not readable for this user
                shutil.copy2(entry.path, target)

    def _inside(self, place: str) -> str:
        return f"{self._root}{place}"

    def _bind(self, place: str) -> None:
        _mount(place, self._inside(place), "", MS_BIND | MS_REC)

    def _cover(self, place: str, *, in_memory: bool = False) -> None:
        """Mount an overlay.  Where a file system allows none, the folder is mounted read-only."""
        layer = self._upper / str(len(self._covered))
        self._covered.append(place)
        layer.mkdir()
        # An overlay cannot cover its own layer, and not every disk can be one.
        on_disk = not in_memory and not self._upper.is_relative_to(place)
        error = IsolationError(f"no layer for {place}")
        for memory in (False, True) if on_disk else (True,):
            if memory:
                _mount("tmpfs", str(layer), "tmpfs", 0, "mode=700")
            options = self._layer(place, layer)
            for features in self._features:
                try:
                    _mount("overlay", self._inside(place), "overlay", 0, options + features)
                except IsolationError as refused:
                    error = refused
                else:
                    if memory and len(self.in_memory) < MOST_IN_MEMORY:
                        self.in_memory[place] = os.open(layer / "upper", os.O_RDONLY)
                    return
        self._refused[place] = error
        self._bind_read_only(place)

    def _check_working(self) -> None:
        """Give the working folder a layer of its own if those around it are read-only.

        Without a privilege, the kernel allows no overlay over a folder with mounts inside of it.
        """
        if self._around_working() in self._refused:
            self._cover(str(self._working))
        if error := self._refused.get(self._around_working()):
            raise error

    def _around_working(self) -> str:
        """Return the covered folder that decides about writes to the working folder."""
        around = [place for place in self._covered if self._working.is_relative_to(place)]
        return max(around, key=len, default="")

    def _cover_file(self, place: str) -> None:
        """Mount a copy of a mounted file; a large one is mounted read-only."""
        is_small = Path(place).stat().st_size <= LARGEST_COPY_BYTES
        if not is_small or not os.access(place, os.R_OK | os.W_OK):
            self._bind_read_only(place)
            return
        copy = self._upper / str(len(self._covered))
        self._covered.append(place)
        shutil.copy2(place, copy)
        _mount(str(copy), self._inside(place), "", MS_BIND)

    def _bind_read_only(self, place: str) -> None:
        self._bind(place)
        flags = os.statvfs(place).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
        _mount("", self._inside(place), "", MS_REMOUNT | MS_BIND | MS_RDONLY | flags)

    def _layer(self, place: str, layer: Path) -> str:
        """Make the folders of an overlay's layer, and return its options."""
        upper, work = layer / "upper", layer / "work"
        upper.mkdir()
        work.mkdir()
        with suppress(OSError):  # a user who is not the owner cannot give it away
            shutil.copystat(place, upper)
            status = Path(place).stat()
            os.chown(upper, status.st_uid, status.st_gid)
        lower = "".join(f"\\{letter}" if letter in "\\:," else letter for letter in place)
        return f"lowerdir={lower},upperdir={upper},workdir={work}"
