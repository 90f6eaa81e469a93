"""Scripts that are audited or timed leave the user's files and processes as they were."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardmark.base.files.scratch import PLACES, PREFIX, lock_file, scratch_folder
from shardmark.cli import main
from shardmark.scripts.start import WRITTEN_FILE, Protection, start_words
from tests import ROOT
from tests.programs import output_of
from tests.waiting import wait_for
from tests.zoo.cases import CASES

(TOKEN_MEANS,) = (case.path for case in CASES if case.script == "token_means")
PATIENCE_SECONDS = 600.0

HARMS = """
import mmap, os, shutil, sqlite3, subprocess, sys
from pathlib import Path

import numpy, torch

here, elsewhere = Path.cwd(), Path(os.environ["ELSEWHERE"])
if os.environ.get("RANK") == "0":
    for folder in (here, elsewhere):
        assert (folder / "log.jsonl").read_text() == "step 400\\n", "another start wrote here"
        (folder / "log.jsonl").open("a").write("step 1\\n")
        shutil.rmtree(folder / "emptied")
        (folder / "emptied").mkdir()
        (folder / "made").mkdir()  # fails if another start has made it
        (folder / "renamed").rename(folder / "renamed-again")
        (folder / "removed.txt").unlink()
        os.truncate(folder / "truncated.bin", 1)
        os.chmod(folder / "mode.sh", 0o600)
        os.utime(folder / "touched.txt", (1, 1))
        (folder / "linked").symlink_to("nowhere")
        torch.save({"step": 1}, folder / "best.pt")
        array = numpy.memmap(folder / "mapped.bin", dtype="u1", mode="r+")
        array[:] = 7
        array.flush()
        with sqlite3.connect(folder / "runs.db") as database:
            database.execute("insert into runs values (2)")
        subprocess.run(["sh", "-c", f"echo 1 > {folder}/by-another-program.txt"], check=True)
    (Path.home() / ".cache").mkdir(exist_ok=True)
    (Path.home() / ".cache" / "hub").write_text("downloaded")
    Path("/tmp/shardmark-test-written").write_text("temporary")
    subprocess.Popen(["setsid", "sleep", "1000"])
"""


def prepared(folder: Path) -> None:
    """Fill a folder with what a training leaves behind."""
    (folder / "emptied" / "deep").mkdir(parents=True)
    (folder / "emptied" / "deep" / "best.pt").write_bytes(b"best of a real training")
    (folder / "renamed").mkdir()
    (folder / "renamed" / "a.txt").write_text("a")
    (folder / "log.jsonl").write_text("step 400\n")
    for name in ("removed.txt", "truncated.bin", "mode.sh", "touched.txt", "best.pt", "mapped.bin"):
        (folder / name).write_bytes(b"0123456789")
    with sqlite3.connect(folder / "runs.db") as database:
        database.execute("create table runs (number)")
        database.execute("insert into runs values (1)")


def state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Type, mode, time and content of everything in a folder."""
    facts: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        facts[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_ino, content)
    return facts


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A working folder with a script, a folder elsewhere, and a home."""
    names = ("working", "elsewhere", "home")
    working, elsewhere, home = folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
    for folder in (working, elsewhere):
        prepared(folder)
    (working / "train.py").write_text(HARMS + TOKEN_MEANS.read_text())
    monkeypatch.setenv("ELSEWHERE", str(elsewhere))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(working)
    return folders


def processes_with(word: str) -> list[psutil.Process]:
    """Living processes with the word in their environment."""
    alive = []
    for process in psutil.process_iter():
        try:
            if word in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in alive if process.pid != os.getpid()]


def abandoned_folders() -> set[Path]:
    """Scratch folders whose owners have ended; other tests have some in use."""
    abandoned = set()
    for lock in (lock for place in PLACES for lock in place.glob(f"{PREFIX}*/{lock_file()}")):
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                abandoned.add(lock.parent)
        except OSError:
            continue
    return abandoned


def test_audit_and_time_leave_all_files_as_they_were(
    folders: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDMARK_TEST_MARK", str(folders[0]))
    before = [state(folder) for folder in folders]
    abandoned = abandoned_folders()
    assert main(["audit", "--format", "json", "--ranks", "2", "--", "train.py", "--right"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["audits"]
    assert report["method"].startswith("replay"), report["answer"]
    assert "unchanged" in report["writes"]
    assert "best.pt" in report["writes"] or "by-another-program.txt" in report["writes"]
    assert [state(folder) for folder in folders] == before

    run = folders[0].parent / "run"
    words = [
        "time",
        "--ranks",
        "2",
        "--steps",
        "3",
        "--warmup",
        "1",
        "--repeats",
        "2",
        "--no-audit",
    ]
    assert main([*words, "--out", str(run), "train.py --right"]) == 0
    assert "private copy" in capsys.readouterr().out
    assert [state(folder) for folder in folders] == before
    assert not Path("/tmp/shardmark-test-written").exists()
    wait_for(lambda: not processes_with(str(folders[0])))
    wait_for(lambda: not abandoned_folders() - abandoned)


WRITE = "open('big', 'wb').write(bytes(10**8))\n"
# What a second rank does that truncates the file of the first and is ended before it writes.
WRITE_AND_EMPTY = f"""
import os, time
if os.environ["RANK"] == "0":
    try:
        {WRITE}
    finally:
        open("big", "wb").close()
else:
    time.sleep(1000)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to mount a small disk")
@pytest.mark.parametrize("write", [WRITE, WRITE_AND_EMPTY])
def test_a_full_disk_is_named_and_left_as_it_was(tmp_path: Path, write: str) -> None:
    (tmp_path / "train.py").write_text(write + TOKEN_MEANS.read_text())
    command = 'mount -t tmpfs -o size=24m tmpfs "$1" && "$0" -m shardmark audit -- train.py; ls $1'
    words = ["unshare", "-m", "sh", "-c", command, sys.executable, str(PLACES[1])]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "TMPDIR: a disk is full" in ended.stderr
    assert ended.stdout == ""  # nothing is left on the disk


def test_writes_can_be_allowed(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Only the record is made: the second start finds what the first one wrote, and fails."""
    main(["audit", "--writes-are-fine", "--ranks", "2", "--", "train.py", "--right"])
    assert "--writes-are-fine allows" in capsys.readouterr().out
    assert (folders[0] / "log.jsonl").read_text() == "step 400\nstep 1\n"
    Path("/tmp/shardmark-test-written").unlink()


FORBID = "cd /proc/sys/user && echo 0 > max_user_namespaces && echo 0 > max_mnt_namespaces"


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to forbid namespaces")
def test_a_machine_without_namespaces_is_refused_before_the_first_start(
    folders: list[Path],
) -> None:
    before = state(folders[0])
    for verb in (
        "audit --ranks 2 -- train.py",
        "time --ranks 2 --no-audit --out ../run train.py",
    ):
        command = f"({FORBID}); exec {sys.executable} -m shardmark {verb}"
        ended = subprocess.run(
            ["unshare", "-U", "-r", "sh", "-c", command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 2, ended
        assert "--writes-are-fine" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert state(folders[0]) == before


MOUNTS = """
set -e
echo 1 > file.txt; echo 1 > mounted.txt; mount --bind file.txt mounted.txt
mkdir -p /run/shardmark-test/disk; mount -t tmpfs none /run/shardmark-test
mkdir /run/shardmark-test/disk /run/shardmark-test/working
truncate -s 4M image; mkfs.ext4 -q image; mount -o loop image /run/shardmark-test/disk
exec "$0" "$@"
"""
START = """
import sys
from pathlib import Path
from tests.distributed.test_no_harm import write_in_a_start
write_in_a_start(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to mount")
@pytest.mark.parametrize("working", ["/run/shardmark-test/working", "/run/shardmark-test/disk"])
def test_mounted_files_and_disks_below_run_are_protected(tmp_path: Path, working: str) -> None:
    words = ("unshare", "-m", "sh", "-c", MOUNTS, sys.executable, "-c", START, working, tmp_path)
    try:
        output_of(*words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    finally:
        Path("/run/shardmark-test/disk").rmdir()
        Path("/run/shardmark-test").rmdir()


FOREIGN = """
from pathlib import Path
from tests.distributed.test_no_harm import write_in_a_start
write_in_a_start(Path.cwd(), Path.cwd(), "mktemp && ")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to give a folder away")
@pytest.mark.parametrize("mounts", ["true", "mkdir mounted && mount -t tmpfs tmpfs mounted"])
def test_an_unprivileged_script_writes_to_its_folder_and_a_temporary_one_of_others(
    tmp_path: Path, mounts: str
) -> None:
    """Without a privilege, the kernel allows no overlay over a folder with mounts inside of it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o1777)
    os.chown(temporary, 1234, 1234)
    working = tmp_path / "working"
    working.mkdir()
    (working / "file.txt").write_text("1\n")
    command = f'{mounts} && cd working && exec setpriv --bounding-set=-sys_admin "$0" "$@"'
    words = ["unshare", "-m", "sh", "-c", command, sys.executable, "-c", FOREIGN]
    variables = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    output_of(*words, cwd=tmp_path, env=os.environ | variables)
    assert not list(temporary.iterdir())


def write_in_a_start(working: Path, elsewhere: Path, first: str = "") -> None:
    """Start a program that writes to the working folder and to a mounted file elsewhere."""
    os.chdir(working)
    Path("log.txt").write_text("1\n")
    program = f"{first}echo 2 >> log.txt && echo 2 >> {elsewhere}/mounted.txt && echo 1 > new.txt"
    with scratch_folder(away_from=working) as folder:
        upper, log = folder / "upper", folder / "log.txt"
        upper.mkdir()
        protection = Protection(folder=str(folder), records=str(folder), upper=str(upper), owned=())
        start = start_words(["sh", "-c", program], os.environ, log, protection)
        assert start.wait(PATIENCE_SECONDS) == 0, log.read_text()
        files = json.loads((folder / WRITTEN_FILE).read_text())["files"]
    assert {str(working / "log.txt"), str(working / "new.txt")} <= {
        *files
    }  # layers in memory have some
    assert Path("log.txt").read_text() == (elsewhere / "file.txt").read_text() == "1\n"
    assert not Path("new.txt").exists()


HANGS = """
import os, subprocess, time
if {condition}:
    subprocess.Popen(["setsid", "sleep", "1000"])
    time.sleep(1000)
"""
CONDITIONS = {"record": "True", "replay": "os.environ['WORLD_SIZE'] == '1'"}
COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
runpy.run_module("shardmark", run_name="__main__")
"""
LAUNCHERS = {
    "torchrun": ("torchrun", "--nproc-per-node", "2"),
    "accelerate": ("accelerate", "launch", "--cpu", "--num_processes", "2"),
    "deepspeed": ("deepspeed", "--num_gpus", "2"),
}
ENDS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}


def in_default(launcher: str, phase: str, end: str) -> bool:
    return launcher == "torchrun" and (phase, end) in {
        ("record", "kill"), ("record", "terminate"), ("record", "timeout"), ("replay", "kill"),
        ("replay", "interrupt"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "phase", "end"),
    [
        pytest.param(
            *case, marks=() if in_default(*case) else (pytest.mark.zoo,), id="-".join(case)
        )
        for case in (
            (launcher, phase, end)
            for launcher in LAUNCHERS
            for phase in ("record", "replay")
            for end in (*ENDS, "timeout")
        )
    ],
)
def test_nothing_is_left_of_an_ended_audit(
    tmp_path: Path, launcher: str, phase: str, end: str
) -> None:
    """The script hangs with a process in a session of its own, on all ranks or in the replays."""
    mark = str(tmp_path)
    hook = HANGS.format(condition=CONDITIONS[phase])
    (tmp_path / "train.py").write_text(hook + TOKEN_MEANS.read_text())
    environment = {**os.environ, "SHARDMARK_TEST_MARK": mark, "DS_ACCELERATOR": "cpu"}
    abandoned = abandoned_folders()
    seconds = ["--timeout", "45"] if end == "timeout" else []
    command = [sys.executable, "-c", COMMAND, "audit", *seconds, "--", *LAUNCHERS[launcher]]
    process = subprocess.Popen(
        [*command, "train.py", "--right"], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        if end != "timeout":
            wait_for(
                lambda: (
                    process.poll() is not None
                    or any(p.name() == "sleep" for p in processes_with(mark))
                )
            )
            process.send_signal(ENDS[end])
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        code = process.returncode
    finally:
        process.kill()
        process.communicate()  # a child that nobody waits for is blamed on a later test
    assert code == {"interrupt": 130, "terminate": -15, "kill": -9, "timeout": 2}[end], errors
    assert "Traceback" not in errors
    wait_for(lambda: not processes_with(mark))
    wait_for(lambda: not abandoned_folders() - abandoned)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
