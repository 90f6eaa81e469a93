"""Experiments on a user's script: the axis `variant`, the commands, and what the script decides."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.files.strict_yaml import format_yaml
from shardmark.bench.launch.fingerprint import fingerprint_of
from shardmark.bench.launch.input_checks import check_plan
from shardmark.bench.launch.session import run_experiment
from shardmark.cli import main
from shardmark.cli.time import experiment_of
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping, load_experiment, to_yaml
from shardmark.experiment.matrix import expand
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import build_workload
from shardmark.scripts.command import parse_command
from shardmark.scripts.variants import named_variants
from tests.unit.bench.launch.fakes import FakeEngine


def mapping(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "tested",
        "workload": {"name": "script", "command": "train.py --data d"},
        "matrix": {"variant": {"ddp": "--strategy ddp", "plain": ""}, "world_size": [1, 2]},
    }
    return base | changes


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text("import beside\n")
    return path


@pytest.mark.usefixtures("script")
def test_each_variant_is_a_command_on_each_number_of_ranks() -> None:
    plan = expand(from_mapping(mapping()))
    cells = {
        (trial.strategy.name, trial.world_size, trial.workload.command)  # type: ignore[attr-defined]
        for trial in plan.trials
    }
    assert cells == {
        (name, ranks, command)
        for name, command in (
            ("ddp", "train.py --data d --strategy ddp"),
            ("plain", "train.py --data d"),
        )
        for ranks in (1, 2)
    }
    trial = plan.trials[0]
    assert plan.strategies == ("ddp", "plain")
    assert plan.twin is None
    assert not plan.left_out
    assert (trial.varied, trial.samples_per_step, trial.precision) == ({}, None, "script")
    assert all(rank.counts_loss for rank in trial.layout.ranks)
    assert Trial.model_validate_json(trial.model_dump_json()) == trial
    check_plan(plan)


def test_the_file_as_stored_loads_again(tmp_path: Path) -> None:
    experiment = from_mapping(mapping(), ["recipe.steps=40", "measure.repeats=2"])
    (tmp_path / "stored.yaml").write_text(to_yaml(experiment))
    assert load_experiment(tmp_path / "stored.yaml") == experiment


@pytest.mark.parametrize(
    ("command", "variants"),
    [("train.py", {"a": "--x"}), ("", {"first": "train.py --x", "second": "other.py"})],
)
def test_a_script_beside_its_experiment_file(
    command: str, variants: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "a folder", tmp_path / "elsewhere"
    for path in (folder, elsewhere):
        path.mkdir()
    for name in ("train.py", "other.py"):
        (folder / name).write_text("")
    file = folder / "own.yaml"
    workload = {"name": "script", "command": command}
    file.write_text(format_yaml(mapping(workload=workload, matrix={"variant": variants})))
    monkeypatch.chdir(elsewhere)
    check_plan(expand(load_experiment(file)))


def test_variants_are_set_on_the_command_line() -> None:
    (entry,) = from_mapping(mapping(), ["matrix.variant={new: --fast}"]).matrix["strategy"]
    assert entry == {"name": "new", "arguments": "--fast"}


MISTAKES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"recipe": {"optimizer": {"lr": 0.1}}}, "optimizer is set, which the script decides"),
    ({"recipe": {"global_batch": 8, "steps": 5}}, "global_batch is set, which the script decides"),
    ({"workload": {"name": "script", "loader_workers": 2}}, "loader_workers is set"),
    ({"matrix": {"world_size": [2]}}, "give variant: {NAME:"),
    ({"matrix": {"variant": {"a/b": ""}}}, "a/b"),
    ({"matrix": {"variant": ["ddp"]}}, "ddp"),
    (
        {"matrix": {"variant": {"a": ""}, "recipe.precision": ["bf16"]}},
        "the script decides recipe.precision",
    ),
    (
        {"workload": {"name": "script", "until_exit": True}, "recipe": {"steps": 5}},
        "keep one of the two",
    ),
)


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_what_the_script_decides_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        from_mapping(mapping(**changes))
    assert message in str(caught.value)


def test_other_workloads_need_a_recipe_as_before() -> None:
    other = mapping(
        workload={"name": "classification", "model": "resnet18", "dataset": "digits"},
        matrix={"strategy": ["ddp"]},
        recipe={"steps": 5},
    )
    with pytest.raises(InputError, match="give exactly one of global_batch and per_rank_batch"):
        from_mapping(other)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("missing.py", "no file 'missing.py'"),
        ("python -m missing.module", "no module 'missing.module'"),
        ("torchrun --nproc-per-node 2 train.py", "itself starts ranks"),
        ("train.py --world-size {ranks}", "{ranks} is for audit"),
        ("train.py 'open", "No closing quotation"),
        ("", "it is empty"),
    ],
)
def test_a_command_that_cannot_be_run(command: str, message: str) -> None:
    alone = mapping(workload={"name": "script", "command": command}, matrix={"variant": {"a": ""}})
    plan = expand(from_mapping(alone))
    with pytest.raises(InputError) as caught:
        check_plan(plan)
    assert message in str(caught.value)


def test_the_script_and_what_it_imports_are_the_fingerprint(script: Path) -> None:
    trials = expand(from_mapping(mapping())).trials
    before = fingerprint_of(trials)
    assert {source.file for source in before.sources.values()} == {"train.py", "beside.py"}
    (script.parent / "beside.py").write_text("changed = 1")
    assert list(before.changes(fingerprint_of(trials)))


def test_a_script_shows_no_model() -> None:
    with pytest.raises(InputError, match="its model and its data are not known"):
        build_workload(from_mapping(mapping()).workload, seed=0)


NAMES: tuple[tuple[list[str], str, dict[str, str]], ...] = (
    (
        [
            "train.py --strategy ddp",
            "torchrun --nproc-per-node 2 train.py --strategy fsdp",
            "train.py --plain",
        ],
        "train.py",
        {"ddp": "--strategy ddp", "fsdp": "--strategy fsdp", "plain": "--plain"},
    ),
    (["train.py", "train.py --compile"], "train.py", {"train": "", "compile": "--compile"}),
    (
        ["train.py --lr=0.1 --b 4", "train.py --lr 0.2 --b 4", "train.py --lr 0.3 --b 4"],
        "train.py",
        {name: f"--{name} --b 4" for name in ("lr=0.1",)}
        | {f"lr={rate}": f"--lr {rate} --b 4" for rate in ("0.2", "0.3")},
    ),
    (["a.py", "b.py --x 1"], "", {"a": "a.py", "b x=1": "b.py --x 1"}),
    (
        ["python -m pkg.train --a", "python -m pkg.train --b 'c d'"],
        "python -m pkg.train",
        {"a": "--a", "c d": "--b 'c d'"},
    ),
    (["runs/train.py --x 1"], "runs/train.py --x 1", {"train": ""}),
)


@pytest.mark.parametrize(("commands", "shared", "variants"), NAMES)
def test_variants_are_named_by_what_differs(
    commands: list[str], shared: str, variants: dict[str, str]
) -> None:
    parsed = [parse_command(shlex.split(command)) for command in commands]
    assert named_variants(parsed) == (shared, variants)
    from_mapping(experiment_of(parsed, [2]))


def test_ranks_are_those_of_the_commands() -> None:
    one, two, four = (
        parse_command(shlex.split(words))
        for words in ("train.py", "torchrun --nproc-per-node 2 a.py", "deepspeed --num_gpus=4 b.py")
    )
    sizes = [
        experiment_of(commands, ranks)["matrix"]["world_size"]
        for commands, ranks in (([one], []), ([one, two], []), ([two, four], [1, 2]))
    ]
    assert sizes == [[1], [2], [1, 2]]
    with pytest.raises(InputError, match="2 and 4 ranks"):
        experiment_of([two, four], [])


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py", "train.py"], "is there twice"),
        (["bash train.sh"], "begins with bash, a shell script"),
        (["train.py 'open"], "No closing quotation"),
        (["torchrun --max-restarts 3 train.py"], "--max-restarts 3 would not count"),
        (["A=1 train.py"], "env A=1 would not count"),
        (["uv run python train.py"], "uv run would not count"),
        (["env RANKS={ranks} train.py"], "{ranks} is for audit"),
        (["torchrun --nproc-per-node 2 train.py --shards={ranks}"], "and write their number"),
        (["nohup torchrun --nproc-per-node 2 train.py"], "nohup would not count"),
        (
            ["accelerate launch --mixed_precision bf16 train.py"],
            "--mixed_precision bf16 would not count",
        ),
        (["train.py", "--ranks", "two"], "--ranks: found 'two'"),
        (["train.py", "--steps", "5", "--until-exit"], "--until-exit"),
        (["--only", "workers", "train.py"], "--improve"),
        (["--improve", "--no-audit", "train.py"], "leave one of the two out"),
        (["--improve", "train.py", "train.py --fast"], "a second command"),
        (["--improve", "--ranks", "1,2", "train.py"], "2 numbers"),
        (["--keep-if-faster", "train.py"], "at least two"),
        (["--keep-if-faster", "--repeats", "5", "train.py", "train.py --fast"], "--repeats"),
    ],
)
def test_mistakes_of_a_command_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.usefixtures("script")
def test_words_behind_a_script_are_its_arguments() -> None:
    """A subcommand is no second script."""
    for words in (["train.py", "fit"], ["torchrun", "--nproc-per-node", "2", "train.py", "fit"]):
        assert main(["time", "--dry-run", "--no-audit", "--", *words]) == 0


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("words", [["time"], ["why", "--quiet"]])
def test_only_audit_writes_the_number_of_ranks_into_a_command(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--", "python", "train.py", "--world-size", "{ranks}"]) == 2
    printed = capsys.readouterr().err
    assert "{ranks} is for audit: all else measures what torchrun starts, or one" in printed


@pytest.mark.usefixtures("script")
def test_why_refuses_options_of_a_launcher_as_time_does(capsys: pytest.CaptureFixture[str]) -> None:
    """It starts the ranks itself, so that mixed precision would be left out without a word."""
    words = ["accelerate", "launch", "--mixed_precision", "bf16", "train.py"]
    assert main(["why", "--", *words]) == 2
    assert "--mixed_precision bf16 would not count" in capsys.readouterr().err


def test_a_secret_is_in_no_name_and_no_file_and_another_one_continues(script: Path) -> None:
    commands = [f"train.py --strategy {name} --api-key KEY-{name}" for name in ("ddp", "fsdp")]

    def asked(secret: str) -> Experiment:
        parsed = [parse_command(text.replace("KEY", secret).split()) for text in commands]
        return from_mapping(experiment_of(parsed, [2]) | {"measure": {"verify": False}})

    first, engine = script.parent / "run", FakeEngine()
    run_experiment(asked("open-sesame"), first, engine=engine)
    assert all("open-sesame" in str(trial) for trial in engine.ran), "the ranks get it"
    files = [path for path in first.rglob("*") if path.is_file()]
    assert not [path for path in files if "open-sesame" in path.name + path.read_text()]
    assert any("--api-key ***" in path.read_text() for path in files)
    run_experiment(asked("another-word"), first, engine=(again := FakeEngine()))
    assert not again.ran, "it is the same experiment, and complete"


@pytest.mark.usefixtures("script")
def test_a_command_line_is_an_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["time", "--ranks", "1,2", "train.py --strategy ddp", "train.py --strategy fsdp"]
    assert main([*words, "--repeats", "1", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [printed.count(text) for text in ("ddp-w1", "ddp-w2", "fsdp-w1", "fsdp-w2")] == [1] * 4
    assert "4 trials" in printed


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    "words",
    [
        ["torchrun --nproc-per-node 2 train.py --lr 3"],
        ["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "3"],
        ["torchrun", "--nproc-per-node=2", "-m", "train", "--data", "my data"],
    ],
)
def test_one_command_may_follow_the_options_word_by_word(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", "--repeats", "1", "--dry-run", "--", *words]) == 0
    printed = capsys.readouterr().out
    assert "1 trial" in printed
    assert "2 ranks" in printed
