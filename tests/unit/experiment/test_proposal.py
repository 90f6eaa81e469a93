"""Experiments proposed from training scripts, which are read and never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.strict_yaml import parse_yaml
from shardmark.experiment.load import from_mapping
from shardmark.experiment.proposal import propose
from shardmark.experiment.script_reading import Reading, read_script

VISION = """
import argparse
import torch
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch-size", "-b", type=int, default=128)
args = parser.parse_args()
EPOCHS = 2 * 5
torch.manual_seed(7)
model = torchvision.models.resnet18(num_classes=10)
data = torchvision.datasets.CIFAR10("pictures", train=True)
test_loader = DataLoader(data, batch_size=512)
loader = DataLoader(data, args.batch_size, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
for epoch in range(EPOCHS):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
raise SystemExit("it was run")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def reading(script: Path, text: str) -> Reading:
    script.write_text(text)
    return read_script(script)


def proposed(script: Path, text: str, ranks: int = 2) -> dict[str, Any]:
    script.write_text(text)
    mapping = parse_yaml(propose(script, ranks).text, "proposal")
    assert isinstance(mapping, dict)
    return mapping


def test_known_model_and_data_make_an_experiment_of_all_strategies(script: Path) -> None:
    mapping = proposed(script, VISION)
    assert mapping["workload"] == {
        "name": "classification",
        "model": "resnet18",
        "dataset": "cifar10",
        "data_dir": "pictures",
    }
    recipe = from_mapping(mapping, place="proposal").recipe
    assert (recipe.global_batch, recipe.epochs, recipe.seed) == (128, 10, 7)
    assert (recipe.precision, recipe.gradient_clipping) == ("bf16", 1.0)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.momentum) == ("sgd", 0.1, 0.9)


def test_batch_of_a_distributed_script_counts_for_each_rank(script: Path) -> None:
    text = "torch.distributed.init_process_group()\n" + VISION
    assert proposed(script, text, ranks=4)["recipe"]["global_batch"] == 512


def test_other_scripts_are_measured_as_they_are(script: Path) -> None:
    text = (
        "parser.add_argument('--strategy', choices=['ddp', 'fsdp'])\n"
        "torch.distributed.init_process_group()\n"
    )
    mapping = proposed(script, text, ranks=4)
    assert mapping["matrix"] == {
        "variant": {"ddp": "--strategy ddp", "fsdp": "--strategy fsdp"},
        "world_size": [1, 4],
    }
    from_mapping(mapping, place="proposal")
    alone = proposed(script, "optimizer = SGD(model.parameters(), 0.1)\n", ranks=4)
    assert alone["matrix"]["world_size"] == [1]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("AdamW(parameters)", "optimizer.weight_decay", 0.01),
        ("Adam(parameters, betas=(0.9, 0.95))", "optimizer.betas", [0.9, 0.95]),
        ("with autocast('cuda'): pass", "precision", "fp16"),
        ("Accelerator(mixed_precision='no')", "precision", "fp32"),
        ("TrainingArguments(out, bf16=True)", "precision", "bf16"),
        ("TrainingArguments(out, learning_rate=3e-4)", "optimizer.lr", 3e-4),
        ("get_cosine_schedule_with_warmup(o, num_warmup_steps=9)", "schedule.warmup_steps", 9),
        ("model = torch.compile(model)", "compile", "model"),
        ("re.compile('a')", "compile", None),
        ("model = timm.create_model('vit_tiny_patch16_224')", "model", "timm:vit_tiny_patch16_224"),
        ("for epoch in range(start, 9): pass", "epochs", None),
        ("n = 4\nn = 5\nset_seed(n)", "seed", None),
        ("n = n\nset_seed(n)", "seed", None),
        ("set_seed(1 / 0)", "seed", None),
    ],
)
def test_settings_are_read(script: Path, text: str, name: str, value: Any) -> None:
    setting = reading(script, text).settings.get(name)
    assert (None if setting is None else setting.value) == value


def test_what_is_not_known_has_a_reason(script: Path) -> None:
    missing = reading(script, "SGD(parameters, lr=float(sys.argv[1]))\nStepLR(o, 30)").missing
    assert missing["optimizer.lr"].startswith("line 1: the value of `float(sys.argv[1])`")
    assert missing["schedule"] == "line 2: StepLR is not translated"
    assert missing["batch"] == "nothing in the script sets it"


TRAINER = """
from tokenizers import models
tokenizer = Tokenizer(models.BPE())
other = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
parser = HfArgumentParser((ModelArguments, TrainingArguments))
arguments = TrainingArguments("out", optim="adafactor", label_smoothing_factor=0.1)
SFTTrainer(model, arguments).train()
"""


def test_a_trainer_is_read_by_its_own_arguments(script: Path) -> None:
    script.write_text(TRAINER)
    proposal = propose(script, 2)
    found = "\n".join(proposal.lines)
    assert 'model: "hf:Qwen/Qwen3-0.6B" (line 5' in found
    assert 'optimizer.name: "adafactor" (line 7' in found
    assert 'schedule.name: "linear"' in found, "the default of transformers"
    assert "world_size: [1, 2]" in proposal.text
    assert proposal.left_out == ("label_smoothing_factor (line 7: label_smoothing_factor=0.1)",)


def test_what_is_no_model_and_what_is_not_translated_is_not_found(script: Path) -> None:
    script.write_text("models.BPE()\nTrainingArguments(o, optim='lion_8bit', lr_scheduler_type=k)")
    proposal = propose(script, 2)
    missing = "\n".join(proposal.missing)
    for text in (
        "model: line 1: `models.BPE()` is no model",
        "`'lion_8bit'` is not",
        "schedule.name",
    ):
        assert text in missing
    assert "adamw" not in proposal.text


def test_what_an_experiment_cannot_say_is_listed(script: Path) -> None:
    text = VISION + (
        "loss = nn.CrossEntropyLoss(label_smoothing=0.1)\n"
        "t = T.Compose([T.RandomCrop(32, padding=4), T.ToTensor(), RandAugment()])\n"
        "sampler = WeightedRandomSampler(weights, 9)\n"
        "np.random.RandomState(0)\n"
    )
    script.write_text(text)
    names = [line.partition(" (")[0] for line in propose(script, 2).left_out]
    assert names == [
        *("incomplete last batch of an epoch", "label_smoothing"),
        *("augmentation by RandomCrop", "augmentation by RandAugment", "weighted sampling"),
    ]
    assert "# Left out: label_smoothing (line " in propose(script, 2).text
    script.write_text(VISION.replace("shuffle=True", "shuffle=True, drop_last=True"))
    assert not propose(script, 2).left_out


@pytest.mark.parametrize("text", ["if:", "a = '\0'"])
def test_a_file_that_is_not_python_is_refused(script: Path, text: str) -> None:
    with pytest.raises(InputError, match="is not Python"):
        reading(script, text)


def test_a_missing_script_is_refused(script: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_script(script)
