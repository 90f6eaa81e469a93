"""The audit finds the faults of the zoo by their causes, and blames no right script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardmark.audit.script import audit_script
from shardmark.base.evidence.accepted import ACCEPTABLE
from shardmark.scripts.command import parse_command
from tests.zoo.cases import CASES, UNDECIDED, Case
from tests.zoo.forked import start_forked
from tests.zoo.generated import write_right_scripts

if TYPE_CHECKING:
    from shardmark.audit.audit import AuditReport

IN_EVERY_RUN = {"fsdp2_local_clip", "fsdp1_local_clip"}
"""Scripts besides those of DDP that the default run audits; `pytest -m zoo` audits the others."""

LONGEST_SECONDS = 240.0

PARAMETERS = [
    pytest.param(
        case,
        id=case.script,
        marks=() if case.framework == "ddp" or case.script in IN_EVERY_RUN else (pytest.mark.zoo,),
    )
    for case in CASES
]


def audited(*words: str, accept: Sequence[str] = (), until_epoch: bool = False) -> AuditReport:
    """Audit with batch norm of each rank's samples as a fault, unless it is accepted."""
    return audit_script(
        parse_command(words),
        ranks=2,
        until_epoch=until_epoch,
        accept=accept,
        longest_seconds=LONGEST_SECONDS,
        start=start_forked,
    )


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_cause_of_a_wrong_script_is_named(case: Case) -> None:
    report = audited(str(case.path), until_epoch=case.until_epoch)
    assert report.same is False
    assert report.findings[0].name == case.cause, report.answer


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_right_script_is_not_blamed(case: Case) -> None:
    report = audited(str(case.path), "--right", until_epoch=case.until_epoch)
    assert report.same is True, report.answer


@pytest.mark.parametrize("script", UNDECIDED)
def test_a_gradient_that_depends_on_the_order_of_samples_is_no_reference(script: str) -> None:
    path = Path(__file__).with_name(f"{script}.py")
    report = audited(str(path))
    assert report.same is None
    assert "order of the samples" in report.answer
    assert audited(str(path), "--right").same is True


ACCEPTED = [
    parameter for parameter, case in zip(PARAMETERS, CASES, strict=True) if case.cause in ACCEPTABLE
]


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_cause_that_is_accepted_is_no_deviation(case: Case) -> None:
    report = audited(str(case.path), accept=[case.cause], until_epoch=case.until_epoch)
    assert report.same is True, report.answer
    assert [finding.name for finding in report.accepted] == [case.cause]
    assert report.findings == ()
    assert all(check.holds for check in report.checks)


def test_a_fault_beside_an_accepted_cause_is_found(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "batch_norm_share.py").read_text()
    right, wrong = tmp_path / "train.py", tmp_path / "wrong.py"
    right.write_text(text)
    wrong.write_text(text.replace("momentum=0.9", "momentum=0.9 / (1 + dist.get_rank())"))
    accept = ["batch_norm_of_share"]
    report = audited(str(right), accept=accept)
    assert report.same is True, report.answer
    assert "as is usual" in report.answer
    assert "batch norm takes its statistics from the samples of one rank" in report.answer
    assert {"first update", "gradient, step 3"} <= {check.name for check in report.checks}
    report = audited(str(wrong), accept=accept)
    assert report.same is False
    assert [finding.name for finding in report.findings] == ["settings_differ"], report.answer
    assert [finding.name for finding in report.accepted] == accept


@pytest.mark.parametrize("column", [2, 3])
def test_uneven_targets_beside_batch_norm_of_a_rank_are_named(tmp_path: Path, column: int) -> None:
    text = (Path(__file__).parent / "batch_norm_share.py").read_text()
    script = tmp_path / "train.py"
    counted = f"model(inputs), labels.where(inputs[:, {column}] > 0, -100)"  # 3 and 2 in step 1
    script.write_text(text.replace("model(inputs), labels", counted))
    report = audited(str(script), accept=["batch_norm_of_share"])
    assert [finding.name for finding in report.findings] == ["uneven_weights"], report.answer
    assert [finding.name for finding in report.accepted] == ["batch_norm_of_share"]
    report = audited(str(script))
    names = [finding.name for finding in report.findings]
    assert names == ["uneven_weights", "batch_norm_of_share"], report.answer


@pytest.mark.parametrize(
    "logs",
    ["model.module(inputs[:4])", "torch.no_grad()(model.module)(inputs[:4])"],
    ids=["with gradients", "without"],
)
def test_a_pass_of_one_rank_alone_shifts_no_batch_norm(tmp_path: Path, logs: str) -> None:
    text = (Path(__file__).parent / "batch_norm_share.py").read_text()
    right, wrong, accept = tmp_path / "train.py", tmp_path / "wrong.py", ["batch_norm_of_share"]
    right.write_text(
        text.replace("    loss = ", f"    if dist.get_rank() == 0:\n        {logs}\n    loss = ")
    )
    # From the second step on, the gradient is that of one rank's own mean over targets.
    uneven = "model(inputs), labels.where((inputs[:, 0] > 0) | (step < 1), -100)"
    wrong.write_text(right.read_text().replace("model(inputs), labels", uneven))
    report = audited(str(right), accept=accept)
    assert report.same is True, report.answer
    assert "gradient, step 3" in {check.name for check in report.checks}
    report = audited(str(wrong), accept=accept)
    assert [finding.name for finding in report.findings] == ["uneven_weights"], report.answer


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ("torch.cat([inputs, inputs.flip(1)])", "labels.repeat(2)"),
        ("torch.stack([inputs, inputs.flip(1)], 1).flatten(0, 1)", "labels.repeat_interleave(2)"),
    ],
    ids=["views behind each other", "views of a sample together"],
)
def test_batch_norm_of_a_rank_is_accepted_in_any_order_of_its_rows(
    tmp_path: Path, rows: str, labels: str
) -> None:
    text = (Path(__file__).parent / "batch_norm_share.py").read_text()
    script = tmp_path / "train.py"
    script.write_text(text.replace("model(inputs), labels", f"model({rows}), {labels}"))
    report = audited(str(script), accept=["batch_norm_of_share"])
    assert report.same is True, report.answer
    assert [finding.name for finding in report.accepted] == ["batch_norm_of_share"]


@pytest.mark.zoo
@pytest.mark.parametrize("factor", [1.0001, 1.01])
def test_a_wrong_gradient_beside_an_accepted_cause_is_found(tmp_path: Path, factor: float) -> None:
    text = (Path(__file__).parent / "batch_norm_share.py").read_text()
    wrong, accept = tmp_path / "wrong.py", ["batch_norm_of_share"]
    factor_on_ranks = f"({factor} if dist.get_world_size() > 1 else 1)"
    changed = f"model.module[3].bias.grad.mul_{factor_on_ranks}\n    optimizer.step()"
    wrong.write_text(text.replace("optimizer.step()", changed))
    report = audited(str(wrong), accept=accept)
    assert report.same is False, report.answer
    assert report.findings == ()
    assert "3.bias" in report.answer
    assert [finding.name for finding in report.accepted] == accept


SKIPS_A_STEP = """
import torch
from torch import nn

torch.distributed.init_process_group("gloo")
torch.manual_seed(torch.distributed.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
for _ in range(20):
    optimizer.zero_grad()
    inputs, targets = torch.randn(16, 8), torch.randint(4, (16,))
    loss = nn.functional.cross_entropy(model(inputs), targets, ignore_index=0)
    scaler.scale(64 * loss).backward()  # infinite for the first scales
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_step_that_the_scaler_skips_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SKIPS_A_STEP)
    report = audited(str(path))
    assert [finding.name for finding in report.findings] == ["uneven_weights"], report.answer


HABITS = {
    "two losses of one batch": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def step(inputs, targets):
    nn.functional.mse_loss(model(inputs)[:, 0], targets[:, 0]).backward()
    nn.functional.mse_loss(model(inputs)[:, 1], targets[:, 1]).backward()
    optimizer.step()
""",
    "two views of one batch": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def step(inputs, targets):
    for view in (inputs, inputs.flip(1)):
        ((model(view) - targets) ** 2).mean().backward()
    optimizer.step()
""",
    "two views of one batch by a loss of torch": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def step(inputs, targets):
    for view in (inputs, inputs.flip(1)):
        nn.functional.mse_loss(model(view), targets).backward()
    optimizer.step()
""",
    "a sum that is divided by the batch size of a rank": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs, targets):
    (nn.functional.mse_loss(model(inputs), targets, reduction="sum") / 4).backward()
    optimizer.step()
""",
    "squares that are summed by hand and divided by the batch size of a rank": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs, targets):
    (((model(inputs) - targets) ** 2).sum() / 4).backward()
    optimizer.step()
""",
    "two sums, of which one has a weight, that are divided by the batch size of a rank": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step(inputs, targets):
    outputs = model(inputs)
    errors = nn.functional.mse_loss(outputs, targets, reduction="sum")
    divergence = (outputs.exp() - outputs - 1).sum()
    ((errors + 0.5 * divergence) / 4).backward()
    optimizer.step()
""",
    "a sum that is divided by the batch size of a rank, a mean, and the squares of weights": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step(inputs, targets):
    outputs = model(inputs)
    errors = nn.functional.mse_loss(outputs, targets, reduction="sum") / 4
    squares = sum((parameter ** 2).sum() for parameter in model.parameters())
    (errors + outputs.exp().mean() + 0.1 * squares).backward()
    optimizer.step()
""",
    "two sums in a model that computes its loss, of which one is rare": """
class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, inputs, targets):
        loss = nn.functional.mse_loss(self.first(inputs), targets, reduction="sum") / 4
        rare = inputs[:, 0] > 1
        if rare.any():
            outputs = self.second(inputs[rare])
            loss = loss + nn.functional.mse_loss(outputs, targets[rare, :1], reduction="sum") / 4
        return loss

model = nn.parallel.DistributedDataParallel(Tasks(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs, targets):
    model(inputs, targets).backward()
    optimizer.step()
""",
    "a batch that is split into micro-batches of a fixed size": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs, targets):
    for few, of_few in zip(inputs.split(2), targets.split(2)):
        (nn.functional.mse_loss(model(few), of_few) / 2).backward()
    optimizer.step()
""",
    "a random number for all rows of a rank": """
class Noise(nn.Module):
    def forward(self, inputs):
        return inputs + torch.rand(1) * torch.randn_like(inputs)

layers = nn.Linear(8, 6), Noise(), nn.Linear(6, 2)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + torch.distributed.get_rank())

def step(inputs, targets):
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
""",
    "a part of the data is left for evaluations, which begin before the training": """
data, rest = torch.utils.data.random_split(data, [48, 16])
evaluation = DataLoader(rest, 2, sampler=DistributedSampler(rest))
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in [*evaluation, *evaluation]:
    with torch.no_grad():
        nn.functional.mse_loss(model(inputs), targets)

def step(inputs, targets):
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
""",
    "an optimizer that reduces": """
class Reducing(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            mean = parameter.grad.clone()
            torch.distributed.all_reduce(mean)
            parameter -= 0.1 * mean / torch.distributed.get_world_size()

model = nn.Linear(8, 2)
optimizer = Reducing(model.parameters(), {"lr": 0.1})

def step(inputs, targets):
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
""",
    "a norm that the script clips itself": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def step(inputs, targets):
    nn.functional.mse_loss(model(inputs), targets).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    torch._foreach_mul_(gradients, 0.01 / norm)
    optimizer.step()
""",
    "a fused optimizer that divides by the scale of the loss": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
scaler = torch.amp.GradScaler("cpu")

def step(inputs, targets):
    scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "two optimizers of one model": """
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2)))
second = torch.optim.AdamW(model.module[1].parameters(), lr=0.1)
optimizer = torch.optim.SGD(model.module[0].parameters(), lr=0.1)

def step(inputs, targets):
    second.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    second.step()
""",
    "an actor and a critic, which steps twice as often": """
actor = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2)))
critic = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2)))
optimizer = torch.optim.Adam(actor.parameters(), lr=0.01)
second = torch.optim.Adam(critic.parameters(), lr=0.01)

def step(inputs, targets):
    for _ in range(2):
        second.zero_grad()
        nn.functional.mse_loss(critic(inputs), targets).backward()
        second.step()
    optimizer.zero_grad()
    with torch.no_grad():
        values = critic(inputs)
    (actor(inputs) * values).mean().backward()
    optimizer.step()
""",
    "a critic with a backward pass in one line for real and for generated samples": """
generator = nn.parallel.DistributedDataParallel(nn.Linear(2, 8))
critic = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 1)))
optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
second = torch.optim.Adam(critic.parameters(), lr=0.01)
loss = nn.BCEWithLogitsLoss()

def step(inputs, targets):
    second.zero_grad()
    made = generator(targets)
    for samples, label in ((inputs, 1.0), (made.detach(), 0.0)):
        loss(critic(samples), torch.full((len(samples), 1), label)).backward()
    second.step()
    optimizer.zero_grad()
    loss(critic(made), torch.ones(len(made), 1)).backward()
    optimizer.step()
""",
    "a decay of the weights before the step": """
layers = nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs, targets):
    nn.functional.mse_loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    optimizer.step()
""",
    "an average of one of two models": """
import copy

body, head = nn.parallel.DistributedDataParallel(nn.Linear(8, 6)), nn.Linear(6, 2)
average = copy.deepcopy(body.module)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)

def step(inputs, targets):
    nn.functional.mse_loss(head(body(inputs)), targets).backward()
    for parameter in head.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()
    optimizer.step()
    for mean, parameter in zip(average.parameters(), body.parameters()):
        mean.data.lerp_(parameter.data, 0.1)
""",
    "a meter of the outputs that has a buffer and is called after the step": """
class Meter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, outputs):
        self.mean.lerp_(outputs.mean(0), 0.1)
        return self.mean

model, meter = nn.parallel.DistributedDataParallel(nn.Linear(8, 2)), Meter()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs, targets):
    outputs = model(inputs)
    nn.functional.mse_loss(outputs, targets).backward()
    optimizer.step()
    meter(outputs.detach())
""",
    "an optimizer that has copies of the parameters": """
network = nn.Linear(8, 2)
copies = [nn.Parameter(parameter.detach().clone()) for parameter in network.parameters()]
model = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.SGD(copies, lr=0.1)

def step(inputs, targets):
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    for copy, parameter in zip(copies, network.parameters()):
        copy.grad = parameter.grad.clone()
    optimizer.step()
    for copy, parameter in zip(copies, network.parameters()):
        parameter.data.copy_(copy)
""",
    "gradients of each sample by torch.func": """
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def loss_of(parameters, inputs, targets):
    return nn.functional.mse_loss(functional_call(model, parameters, inputs[None]), targets[None])

def step(inputs, targets):
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    of_samples = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, inputs, targets)
    for name, parameter in model.named_parameters():
        size = of_samples[name].flatten(1).norm(dim=1).view(-1, *[1] * parameter.dim())
        parameter.grad = (of_samples[name] / (1 + size)).mean(0)
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()
    optimizer.step()
""",
    "samples that are mixed with others of their rank's batch": """
import random
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
random.seed(torch.distributed.get_rank())

def step(inputs, targets):
    share = random.random()
    one_hot = (targets @ torch.ones(2, 3) * torch.arange(3)).softmax(1)
    mixed = share * inputs + (1 - share) * inputs.flip(0)
    shares = share * one_hot + (1 - share) * one_hot.flip(0)
    (-shares * model(mixed).log_softmax(1)).sum(1).mean().backward()
    optimizer.step()
""",
    "passes of equal samples on all ranks, before the optimizer is made": """
net = nn.Linear(8, 2)
for row in x[:5]:
    net(row[None]).square().mean().backward()
importance = [parameter.grad.clone() for parameter in net.parameters()]
net.zero_grad()
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs, targets):
    kept = sum((i * p).square().sum() for i, p in zip(importance, net.parameters()))
    (nn.functional.mse_loss(model(inputs), targets) + kept).backward()
    optimizer.step()
""",
    "losses by row that tensors of one row divide, over the batch of a rank": """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(inputs, targets):
    for rows, wanted in zip(inputs.split(3), targets.split(3)):
        lengths = 1 + rows[:, 0].abs()
        ((model(rows).exp() - wanted).sum(1) / lengths).sum().div(4).backward()
    optimizer.step()
""",
    "two models with one name, whose losses have a backward pass each before both step": """
models = [nn.parallel.DistributedDataParallel(nn.Linear(8, 2)) for _ in range(2)]
optimizer, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)

def step(inputs, targets):
    second.zero_grad()
    nn.functional.mse_loss(models[0](inputs), targets).backward()
    nn.functional.l1_loss(models[1](inputs), targets).backward()
    optimizer.step()
    second.step()
""",
}
LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x[:, :2].sin())
{parts}
for inputs, targets in DataLoader(data, 4, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    step(inputs, targets)
"""


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_of_a_right_script_is_not_blamed(habit: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(parts=HABITS[habit]))
    report = audited(str(path))
    assert report.same is True, report.answer


@pytest.mark.parametrize("of_loss", [True, False])
def test_random_numbers_of_python_in_the_model_or_the_loss_cannot_be_told(
    of_loss: bool, tmp_path: Path
) -> None:
    model = HABITS["a random number for all rows of a rank"].replace("torch.rand(1)", "number()")
    if of_loss:
        model = model.replace("* (1 + number())", "").replace(
            ".backward()", ".mul(number()).backward()"
        )
    seeded = "import random\nnumber = random.random\n"
    seeded += "random.seed(torch.distributed.get_rank())\n"
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(parts=seeded + model))
    report = audited(str(path))
    assert report.same is None, report.answer
    assert "random numbers" in report.answer


ERRORS = "nn.functional.mse_loss(outputs, targets, reduction='sum')"


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        ("nn.functional.mse_loss(outputs, targets) + outputs.exp().sum()", "averaged_sum"),
        (  # the hardest samples
            "nn.functional.mse_loss(outputs, targets) + outputs.exp().sum(1).topk(2).values.mean()",
            "whole_batch_loss",
        ),
        (f"{ERRORS} + outputs.exp().sum()", "averaged_sum"),
        (f"{ERRORS} / 4 + 0.5 * outputs.exp().sum()", "averaged_sum"),
        (f"({ERRORS} + outputs.exp().sum()) / 6", "averaged_sum"),  # no size of a batch
        (  # rank 1 has all targets of step 1
            "(outputs - targets).square()[inputs[:, 0] < -0.5].sum()"
            " / (inputs[:, 0] < -0.5).sum().clamp(min=1)",
            "uneven_weights",
        ),
        (  # the same beside a mean of samples, by hand and by torch
            "outputs.exp().mean() + (outputs - targets).square()[chosen].sum() / chosen.sum()",
            "uneven_weights",
        ),
        (
            "nn.functional.mse_loss(outputs[chosen], targets[chosen])"
            " + outputs.sin().square().mean()",
            "uneven_weights",
        ),
        (  # two terms of one function
            "(outputs - targets).square()[chosen].mean() + 0.3 * outputs.square().mean()",
            "uneven_weights",
        ),
        ("(outputs - targets).square().mean().sqrt()", "whole_batch_loss"),
        ("torch.linalg.vector_norm(outputs - targets)", "whole_batch_loss"),
        (  # one more that needs the samples of all ranks, and deviates more
            "nn.functional.mse_loss(outputs[chosen], targets[chosen])"
            " + 9 * outputs.exp().sum(1).topk(2).values.mean()",
            "",
        ),
    ],
)
def test_a_loss_that_is_a_sum_is_told_from_others(loss: str, cause: str, tmp_path: Path) -> None:
    parts = f"""
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step(inputs, targets):
    outputs, chosen = model(inputs), inputs[:, 0] < 0.3
    ({loss}).backward()
    optimizer.step()
"""
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(parts=parts))
    report = audited(str(path))
    assert [finding.name for finding in report.findings] == ([cause] if cause else []), (
        report.answer
    )
    assert report.same is False


MASKED = """
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
of_one_step, rows = {of_one_step}, []

def step(inputs, targets):
    mask = (targets[:, 0] > 0).float()
    rows.append((inputs, targets, mask))
    if len(rows) == 2:
        for n, (inputs, targets, mask) in enumerate(rows):
            total = sum(mask.sum() for _, _, mask in (rows[n : n + 1] if of_one_step else rows))
            torch.distributed.all_reduce(total)
            optimizer.zero_grad()
            outputs = model(inputs)[:, 0]
            losses = nn.functional.mse_loss(outputs, targets[:, 0], reduction="none")
            loss = (losses * mask).sum() / total
            (loss * torch.distributed.get_world_size()).backward()
            optimizer.step()
        rows.clear()
"""


@pytest.mark.parametrize("of_one_step", [True, False])
def test_targets_that_a_mask_leaves_out_do_not_count(of_one_step: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(parts=MASKED.format(of_one_step=of_one_step)))
    report = audited(str(path))
    names = [finding.name for finding in report.findings]
    assert names == ([] if of_one_step else ["divided_by_other_steps"]), report.answer


SHARDED_BY_HAND = """
model = nn.Linear(8, 2)
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
shard = nn.Parameter(weights.chunk(ranks)[rank].clone())
optimizer = torch.optim.SGD([shard], lr=0.1)

def step(inputs, targets):
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.distributed.all_reduce(gradient)
    shard.grad = gradient.chunk(ranks)[rank] / ranks
    optimizer.step()
    torch.distributed.all_gather(list(weights.chunk(ranks)), shard.detach())
    model.weight.data.copy_(weights[:16].view(2, 8))
    model.bias.data.copy_(weights[16:])
"""


def test_a_zero_that_is_written_by_hand_cannot_be_told(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(parts=SHARDED_BY_HAND))
    report = audited(str(path))
    assert report.same is None
    assert "copies of other parameters" in report.answer


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (".div(torch.distributed.get_world_size())", "averaged_twice"),
        ("[: 2 + torch.distributed.get_rank()]", "uneven_weights"),
    ],
)
def test_mixed_samples_do_not_hide_a_fault(fault: str, cause: str, tmp_path: Path) -> None:
    """A graph tells what the loss is a mean of, where one process mixes other samples."""
    right = HABITS["samples that are mixed with others of their rank's batch"]
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(parts=right.replace(".sum(1).mean()", f".sum(1){fault}.mean()")))
    report = audited(str(path))
    assert report.same is False, report.answer
    assert cause in [finding.name for finding in report.findings]


def test_a_mean_over_what_a_hinge_leaves_is_not_compared_with_other_samples(tmp_path: Path) -> None:
    """Ranks and one process leave out other shares, which makes their means other multiples."""
    right = HABITS["samples that are mixed with others of their rank's batch"]
    hinge = "(0.2 - shares[:, 0] * model(mixed)[:, 0]).relu().mean().backward()"
    loss = next(line.strip() for line in right.splitlines() if "backward" in line)
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(parts=right.replace(loss, hinge)))
    report = audited(str(path))
    assert report.same is not False, report.answer


OWN_LOSSES = {
    "divided inside of a function": """
def loss_of(batch):
    return ((model(batch[0]) - batch[1]) ** 2 / 2).mean()

def step(first, second):
    for batch in (first, second):
        loss_of(batch).backward()
""",
    "divided by the gradient of backward": """
def step(first, second):
    for inputs, targets in (first, second):
        nn.functional.mse_loss(model(inputs), targets).backward(torch.tensor(0.5))
""",
    "gradients divided later": """
def step(first, second):
    for inputs, targets in (first, second):
        (model(inputs) - targets).abs().mean().backward()
    for parameter in model.parameters():
        parameter.grad /= 2
""",
    "half of the squares": """
def step(first, second):
    for inputs, targets in (first, second):
        (0.5 * ((model(inputs) - targets) ** 2).mean() / 2).backward()
""",
    "a sum over two columns, divided by two": """
def step(first, second):
    for inputs, targets in (first, second):
        (((model(inputs) - targets) ** 2).sum(1).mean() / 2).backward()
""",
    "divided inside of a hinge": """
def step(first, second):
    for inputs, targets in (first, second):
        torch.relu((9 - model(inputs) * targets.sign()) / 2).mean().backward()
""",
    "two losses, divided by two": """
def step(first, second):
    for inputs, targets in (first, second):
        errors = model(inputs) - targets
        (((errors**2).mean() + errors.abs().mean()) / 2).backward()
""",
    "a weight that is the number of micro-batches": """
def step(first, second):
    for inputs, targets in (first, second):
        (2.0 * ((model(inputs) - targets) ** 2).mean() / 2).backward()
""",
    "a hook that divides": """
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient / 2)

def step(first, second):
    for inputs, targets in (first, second):
        ((model(inputs) - targets) ** 2).mean().backward()
""",
    "a loss with a hook": """
def step(first, second):
    for inputs, targets in (first, second):
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.register_hook(lambda gradient: gradient / 2)
        loss.backward()
""",
    "a critic of two kinds of samples": """
def step(first, second):
    model(first[0]).mean().backward()
    (-model(second[0])).mean().backward()
""",
}
WINDOWS = """
batches = iter(DataLoader(data, 4, sampler=DistributedSampler(data)))
for first, second in zip(batches, batches):
    optimizer.zero_grad()
    step(first, second)
    optimizer.step()
"""


@pytest.mark.zoo
@pytest.mark.parametrize("name", OWN_LOSSES)
def test_a_right_loss_of_its_own_is_not_said_to_be_undivided(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    model = "model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))\n"
    optimizer = "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
    start = LOOP.partition("{parts}")[0]
    path.write_text(start + model + optimizer + OWN_LOSSES[name] + WINDOWS)
    report = audited(str(path))
    assert report.same is True, report.answer


@pytest.mark.zoo
def test_a_model_that_depends_on_padding_on_the_left_is_not_blamed(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "left_padded_means.py").read_text()
    path = tmp_path / "train.py"
    path.write_text(
        text.replace("(mask.cumsum(1) - 1).clamp(min=0)", "torch.arange(mask.shape[1])")
    )
    report = audited(str(path), "--right")
    assert report.same is None
    assert "padding on the left" in report.answer


SERVED = """
import sys
import types

import numpy
import torch
from torch import nn

sys.modules["vllm"] = types.ModuleType("vllm")
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
server = numpy.random.default_rng(torch.distributed.get_rank())
for _ in range(4):
    tokens = torch.from_numpy(server.integers(0, 9, (4, 6)))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
"""


def test_a_server_of_generation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SERVED)
    report = audited(str(path))
    assert report.same is True, report.answer
    assert any("vllm generates them" in note for note in report.notes)


@pytest.mark.zoo
@pytest.mark.timeout(1800)
def test_no_generated_right_script_is_blamed(tmp_path: Path) -> None:
    blamed = {}
    for path in write_right_scripts(tmp_path, seed=7):
        report = audited(str(path))
        if report.same is not True:
            blamed[path.name] = report.answer
    assert not blamed
