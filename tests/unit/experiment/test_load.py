"""An experiment from a file, a preset or a mapping, changed, written out, and as a schema."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardmark.base.errors import DataError, InputError
from shardmark.base.recipe import Optimizer, Schedule
from shardmark.experiment.engines import LocalOptions, TorchrunOptions
from shardmark.experiment.experiment import Experiment, experiment_schema
from shardmark.experiment.load import from_mapping, load_experiment, preset_names, presets, to_yaml
from shardmark.experiment.matrix import expand
from shardmark.ranks.workloads import check_data

Make = Callable[..., Experiment]

GOOD = """
x-rate: &rate 0.1
name: test
workload: {name: classification}
recipe:
  global_batch: 64
  epochs: 2
  optimizer: {lr: *rate, weight_decay: 5e-4}
matrix:
  strategy: [single, ddp]
"""


def _message(source: str | Path) -> str:
    with pytest.raises(InputError) as caught:
        load_experiment(source)
    return str(caught.value).replace(str(source), "FILE")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "FILE: it is empty; allowed is a mapping"),
        ("- 1", "FILE: found [1]; allowed is a mapping"),
        (b"\xff\xfe\x00\x01", "FILE: not UTF-8 text"),
        (b"#" * (2**18 + 1), "FILE: larger than 256 KiB"),
        ("name: a\nname: b", "FILE, line 2: the key 'name' is given twice"),
        (GOOD.replace("epochs", "epoch"), "FILE: recipe.epoch: no such key; allowed are"),
        (GOOD.replace("epochs", "epoch"), "(nearest: 'epochs')"),
        # `step` is also a key of another section.
        (GOOD.replace("epochs", "step"), "FILE: recipe.step: no such key; allowed are"),
        (GOOD.replace("matrix:", "matrxi:"), "FILE: matrix: missing; this key is required\n"),
        (GOOD.replace("matrix:", "matrxi:"), "FILE: matrxi: no such key; allowed are name, "),
        (GOOD.replace("x-rate", "rate"), "keys of your own, for anchors, begin with x-"),
        (GOOD.replace("ddp]", "ddpp]"), "FILE: matrix.strategy[1].name: found 'ddpp'; nearest"),
        (
            GOOD.replace("  epochs: 2\n", "") + "  steps: [ten]\n",
            "FILE: matrix.recipe.steps[0]: found 'ten'; allowed is a whole number",
        ),
    ],
)
def test_message_describes_the_mistake_in_a_file(
    tmp_path: Path, content: str | bytes, expected: str
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in _message(path)


def test_all_mistakes_are_reported_at_once_in_a_fixed_order(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD.replace("test", "a/b").replace("*rate", "-1").replace("ddp", "ddpp"))
    keys = [line.split(": ")[1] for line in _message(path).splitlines()]
    assert keys == ["name", "recipe.optimizer.lr", "matrix.strategy[1].name"]


@pytest.mark.parametrize("data", [{}, {"version": 3, "services": {"db": {"image": "x"}}}])
def test_file_that_is_no_experiment_has_one_message(data: dict[str, Any]) -> None:
    """Not key by key."""
    with pytest.raises(InputError, match="it is no experiment") as caught:
        from_mapping(data)
    assert len(str(caught.value).splitlines()) == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    assert "(nearest: 'quickstart', " in _message("quickstrat")
    assert "no such file, and no such preset" in _message(tmp_path / "nothing.yaml")
    assert "it is a folder; allowed is a YAML file" in _message(tmp_path)
    (tmp_path / "experiment.yaml").touch(mode=0)
    assert "its experiment is FILE/experiment.yaml" in _message(tmp_path)
    if os.geteuid() != 0:  # root reads every file
        assert "cannot be read: Permission denied" in _message(tmp_path / "experiment.yaml")
    for impossible in ("a\0b", "~no-such-user-here/x", "x" * 5000):
        assert "allowed is a YAML file" in _message(impossible)


def test_written_experiment_loads_to_an_equal_one(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD + "  precision: [fp32, bf16]\n  recipe.optimizer.name: [sgd, adamw]\n")
    experiment = load_experiment(path)
    assert experiment.recipe.optimizer.lr == 0.1
    assert experiment.recipe.optimizer.weight_decay == 5e-4
    path.write_text(to_yaml(experiment))
    again = load_experiment(path)
    assert again == experiment
    assert to_yaml(again) == to_yaml(experiment)
    assert expand(again) == expand(experiment)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_written_optimizers_and_schedules_can_be_read(name: str) -> None:
    """Defaults are written, but not the keys that would be refused when read."""
    optimizer = Optimizer.model_validate({"name": name, "lr": 0.1})
    assert Optimizer.model_validate_json(optimizer.model_dump_json()) == optimizer
    assert ("momentum" in optimizer.model_dump()) == (name == "sgd")
    own = Schedule(name="own", path="torch.optim.lr_scheduler:StepLR", options={"step_size": 2})
    for schedule in (Schedule(), Schedule(name="step", every_steps=10), own):
        assert Schedule.model_validate(schedule.model_dump()) == schedule


def test_every_preset_loads_says_what_it_is_for_and_is_hidden_by_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tuple(presets()) == preset_names()
    assert {"quickstart", "cifar10-strategies", "asu-fsdp-2024"} <= set(preset_names())
    for name, purpose in presets().items():
        assert len(purpose) > 20
        (tmp_path / name).mkdir()
        assert load_experiment(name).name == name


def test_a_module_beside_the_file_comes_before_the_current_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init`, and `init --out reg` below it, write modules of the same name."""
    below = tmp_path / "reg"
    below.mkdir()
    methods = "model = train_data = validation_data = loss = len"
    for folder in (tmp_path, below):
        (folder / "mine.py").write_text(f"class Task: {methods}\nclass Rule: ...\ndef net(): ...\n")
    workload = "{name: own, task: 'mine:Task', options: {model: 'mine:net'}}"
    models = "{name: classification, model: 'mine:net'}"
    optimizer = "optimizer: {name: own, path: 'mine.py:Rule'}"
    axis = "workload.model: ['mine:net', resnet18], "
    for told, varied in ((workload, ""), (models, axis)):
        (below / "experiment.yaml").write_text(
            f"name: mine\nworkload: {told}\nrecipe: {{global_batch: 8, steps: 2, {optimizer}}}\n"
            f"matrix: {{{varied}strategy: [single]}}\n"
        )
        monkeypatch.chdir(tmp_path)
        loaded = load_experiment("reg/experiment.yaml")
        assert loaded.recipe.optimizer.path == f"{below / 'mine.py'}:Rule"
        trained = loaded.workload.model_dump()
        if not varied:
            assert trained["task"] == f"{below / 'mine.py'}:Task"
            assert trained["options"] == {"model": "mine:net"}, "the class's own business"
        else:
            assert trained["model"] == f"{below / 'mine.py'}:net"
            assert loaded.matrix["workload.model"] == [f"{below / 'mine.py'}:net", "resnet18"]
        monkeypatch.chdir(below)
        assert load_experiment("experiment.yaml").recipe.optimizer.path == "mine.py:Rule"


def test_files_beside_the_experiment_are_found_and_both_places_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--set` names them, too; the current folder's come first."""
    below, file = tmp_path / "exp", "exp/e.yaml"
    (below / "data").mkdir(parents=True)
    (below / "x.json").write_text('{"model_type": "gpt2"}')
    (below / "mine.py").write_text("class Task: model = train_data = validation_data = loss = len")
    told = "{name: language, model: 'hf:x.json', dataset: text, data_dir: data, tokenizer: x.json}"
    text = f"name: e\nworkload: {told}\nrecipe: {{global_batch: 8, steps: 2}}\n"
    (tmp_path / file).write_text(f"{text}matrix: {{strategy: [single]}}\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_experiment(file).workload.model_dump()
    assert loaded["model"] == f"hf:{below / 'x.json'}"
    assert (loaded["data_dir"], loaded["tokenizer"]) == (str(below / "data"), str(below / "x.json"))
    own = load_experiment(file, ["workload={name: own, task: 'mine:Task'}"]).workload
    assert own.model_dump()["task"] == f"{below / 'mine.py'}:Task"
    (tmp_path / "data").mkdir()
    assert load_experiment(file).workload.model_dump()["data_dir"] == "data"
    for name, near in (("Taks", "nearest: Task"), ("Other", "it has Task")):
        with pytest.raises(InputError, match=f"has no '{name}'; {near}"):
            load_experiment(file, [f"workload={{name: own, task: 'mine:{name}'}}"])
    both = f"in the current folder {tmp_path} or beside the experiment file"
    for wrong in ("workload.model=hf:y.json", "workload={name: own, task: 'none.py:Task'}"):
        with pytest.raises(InputError, match=both):
            load_experiment(file, [wrong])
    with pytest.raises(DataError, match=both):
        check_data(load_experiment(file, ["workload.data_dir=nowhere"]).workload)


def test_python_sequences_are_accepted_and_experiments_are_immutable() -> None:
    data: dict[str, Any] = {
        "name": "test",
        "workload": {"name": "classification"},
        "recipe": {"global_batch": 64},
        "matrix": {"strategy": ("ddp",), "steps": (10, 20)},
        "slow_ranks": {1: 2, "0": 1.5},
    }
    experiment = from_mapping(data, ["recipe.seed=3"])
    assert experiment.matrix["recipe.steps"] == [10, 20]
    assert experiment.slow_ranks == {1: 2.0, 0: 1.5}
    assert "seed" not in data["recipe"], "the caller's data are left alone"
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment
    with pytest.raises(ValidationError, match="frozen"):
        experiment.name = "other"


def test_overrides_drop_what_they_exclude_and_the_last_holds(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make("steps=10", "recipe.per_rank_batch=8", "seed=1", "recipe.seed=2").recipe
    assert (recipe.steps, recipe.epochs) == (10, None)
    assert (recipe.per_rank_batch, recipe.global_batch) == (8, None)
    assert "--set recipe.steps replaces recipe.epochs: 2\n" in capsys.readouterr().err
    assert recipe.seed == 2
    assert make("recipe.steps=null").recipe.epochs == 2
    experiment = make("matrix.precision=[bf16]", "matrix.recipe.precision=[fp32, bf16]")
    assert experiment.matrix["recipe.precision"] == ["fp32", "bf16"]
    assert "precision" not in experiment.matrix


def test_short_keys_reach_axes_and_the_workload(make: Make) -> None:
    experiment = make(
        "strategy=ddp", "world_size=[2, 4]", "model=resnet50", "matrix.dataset=[random]"
    )
    assert experiment.matrix["strategy"] == ["ddp"]
    assert experiment.matrix["world_size"] == [2, 4]
    assert experiment.matrix["workload.dataset"] == ["random"]
    assert experiment.workload.model_dump()["model"] == "resnet50"
    assert make("optimizer.lr=0.5").recipe.optimizer.lr == 0.5


def test_engine_is_a_name_or_a_mapping(make: Make) -> None:
    assert make().engine == LocalOptions()
    assert make("engine=torchrun").engine == TorchrunOptions(node_seconds=20.0)
    settings = ("engine={name: torchrun, node_rank: 3}", "engine.name=local")
    assert make(*settings).engine == LocalOptions(), "another engine's options are dropped"
    for named in ("engine.name=torchrun", "engine=torchrun"):
        assert make(named, "engine.node_rank=1").engine == TorchrunOptions(node_rank=1)


def test_json_schema_is_complete() -> None:
    schema = experiment_schema()
    definitions, properties = schema["$defs"], schema["properties"]
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(schema)))
    assert references
    assert references <= {f"#/$defs/{name}" for name in definitions}
    names, *entries = properties["matrix"]["properties"]["strategy"]["items"]["oneOf"]
    assert {"single", "ddp", "zero-1", "ps-async"} <= set(names["enum"])
    assert len(entries) == len(names["enum"])
    shared = {"precision", "activation_checkpointing", "gradient_accumulation", "cpu_offload"}
    assert shared | {"name", "bucket_mb"} <= set(definitions["ddp"]["properties"])
    assert not definitions["ddp"]["additionalProperties"]
    for options in ("ClassificationOptions", "DetectionOptions", "TorchrunOptions", "ddp"):
        assert "name" in definitions[options]["required"], "so that editors tell them apart"
    assert properties["slow_ranks"]["propertyNames"] == {"pattern": "^[0-9]+$"}
    described = definitions["Recipe"]["properties"]["global_batch"]["description"]
    assert described.startswith("Samples per optimizer step")
    assert schema["patternProperties"].keys() == {"^x-"}, "a home for anchors"


def test_json_schema_has_axes_by_full_and_short_keys() -> None:
    axes = experiment_schema()["properties"]["matrix"]["properties"]
    assert {"recipe.precision", "precision", "recipe.optimizer.lr", "lr", "world_size"} <= set(axes)
    assert {"workload.model", "model", "strategy.bucket_mb", "strategy.staleness"} <= set(axes)
    assert {"placement.nodes", "nodes", "slow_ranks"} <= set(axes)
    assert not {"warmup_steps", "measure.repeats", "strategy.precision"} & set(axes)
    assert axes["precision"]["items"]["enum"] == ["fp32", "bf16", "fp16"]
    assert axes["precision"]["type"] == "array"


def test_stored_experiment_with_keys_of_restarts_loads() -> None:
    stored = {"max_restarts": 0, "checkpoint_steps": 100, "node_return_seconds": 0}
    loaded = load_experiment("quickstart").model_dump() | {"limits": stored | {"trial_seconds": 9}}
    assert from_mapping(loaded).limits.model_dump() == {"trial_seconds": 9}
