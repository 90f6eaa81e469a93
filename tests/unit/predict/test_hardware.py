"""Cards and nodes: what ships is plausible, and users' own files say where they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardmark.base.errors import InputError
from shardmark.base.files.strict_yaml import parse_yaml
from shardmark.base.results.network import RankSpeed, read_network
from shardmark.bench.analysis.network.links import with_fits
from shardmark.cli import main
from shardmark.predict.hardware.catalogue import (
    Timed,
    joined_node,
    load_card,
    load_node,
    names,
    nodes_of,
)
from shardmark.predict.hardware.written import write_node
from shardmark.predict.timing import Constants
from shardmark.ranks.measure.system import speed
from tests import GOLDEN, ROOT, present


@pytest.mark.parametrize("name", names("cards"))
def test_cards_that_ship(name: str) -> None:
    card = load_card(name)
    assert 1e12 < card.peak("fp32") <= card.peak("fp32", tf32=True) < 1e16
    assert 1e11 < card.memory_bytes_per_second < 1e13
    assert card.source


@pytest.mark.parametrize("name", names("nodes"))
def test_nodes_that_ship(name: str) -> None:
    node = load_node(name)
    links = [node.link_bytes_per_second(ranks) for ranks in range(2, node.node.devices + 1)]
    assert links == sorted(links)
    assert 1e9 < node.network_bytes_per_second < 1e13
    assert node.node.source != "given"


def test_so_many_of_a_card_are_a_node() -> None:
    node = load_node("h100x8")
    assert (node.node.devices, node.link_bytes_per_second(8)) == (8, 450e9)
    with pytest.raises(InputError, match="network_bytes_per_second"):
        node.network_bytes_per_second  # noqa: B018
    assert load_node("rtx-4090x2").link_bytes_per_second(2) == 32e9  # through the host


def test_files_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "peaks: {fp32: 2e12}\nmemory_gib: 8\nmemory_bytes_per_second: 1e11\n"
        "host_bytes_per_second: 8e9\nsource: measured\n"
    )
    node = tmp_path / "node.yaml"
    node.write_text("card: mine.yaml\ndevices: 2\nnetwork_bytes_per_second: 1.25e8\n")
    found = load_node(str(node))
    assert (found.card.peak("fp32"), found.link_bytes_per_second(2)) == (2e12, 8e9)
    node.write_text("card: mine.yaml\ndevices: none\n")
    load_node.cache_clear()
    with pytest.raises(InputError, match=r"node\.yaml.*devices.*its keys are card, devices"):
        load_node(str(node))
    with pytest.raises(InputError, match=r"no node 'dgx-h10'.*nearest: 'dgx-h100'"):
        load_node("dgx-h10")
    with pytest.raises(InputError, match=r"'h100' is a card; say how many: 1xh100 or 8xh100"):
        load_node("h100x")
    with pytest.raises(InputError, match="found h100x0; the number of cards of a node is from 1"):
        load_node("h100x0")
    with pytest.raises(InputError, match=r"'h100' is a card; say how many: 1xh100 or 8xh100"):
        load_node("h100")
    card = tmp_path / "mine.yaml"
    with pytest.raises(InputError, match=r"is a card's file; say how many: 4x.*mine\.yaml"):
        load_node(str(card))
    assert load_node(f"{card}x4").node.devices == 4


@pytest.mark.parametrize(
    ("text", "card", "devices", "nodes"),
    [
        ("8xh100", "h100", 8, None),
        ("h100x8", "h100", 8, None),
        ("H100x8", "h100", 8, None),
        ("2x8xh100", "h100", 8, 2),
        ("2xh100x8", "h100", 8, 2),
        ("4xdgx-a100-80", "a100-80", 8, 4),
        ("DGX-H100", "h100", 8, None),
        ("8xA100-80GB", "a100-80", 8, None),
        ("8xV100-SXM2-32GB", "v100-32", 8, None),
        ("8xH100-SXM5-80GB", "h100", 8, None),
        ("2x4xRTX4090", "rtx-4090", 4, 2),
        ("2x4090", "rtx-4090", 2, None),
        ("8xmi300x", "mi300x", 8, None),
        ("mi300x8", "mi300x", 8, None),
        ("8xGB200", "gb200", 8, None),
        ("1xGH200-96GB", "gh200", 1, None),
        ("4xA100-PCIe-40GB", "a100-pcie-40", 4, None),
        ("2xQuadro-RTX-8000", "rtx-8000", 2, None),
        ("2xA4500", "rtx-a4500", 2, None),
        # as people write so many of a card
        ("8 x H100", "h100", 8, None),
        ("8x H100", "h100", 8, None),
        ("8 H100", "h100", 8, None),
        ("8*h100", "h100", 8, None),
        ("8\u00d7H100", "h100", 8, None),
        ("H100 x8", "h100", 8, None),
        ("2 x 8 x H100", "h100", 8, 2),
        ("2x8 H100", "h100", 8, 2),
        ("4090x8", "rtx-4090", 8, None),
        ("8x4090", "rtx-4090", 8, None),
        ("2x 4090", "rtx-4090", 2, None),
        ("2 x RTX 4090", "rtx-4090", 2, None),
        ("NVIDIA GeForce RTX 4090x2", "rtx-4090", 2, None),
        # several of them, without an x, and as schedulers and clouds write it
        ("8 h100s", "h100", 8, None),
        ("8 NVIDIA H100 GPUs", "h100", 8, None),
        ("8h100", "h100", 8, None),
        ("8-H100", "h100", 8, None),
        ("H100:8", "h100", 8, None),
        ("gpu:h100:8", "h100", 8, None),
        ("gpu_8x_a100_80gb_sxm4", "a100-80", 8, None),
        ("8 X H100", "h100", 8, None),
        ("2 3090s", "rtx-3090", 2, None),
        ("4xL40S", "l40s", 4, None),
        ("4 L40Ss", "l40s", 4, None),
        ("2xL4s", "l4", 2, None),
        ("8 A100s (80GB)", "a100-80", 8, None),
        ("4xV100-32GBs", "v100-32", 4, None),
        ("1xTesla V100S-PCIE-32GB", "v100s-pcie", 1, None),
        ("4 x 8 H100", "h100", 8, 4),
        # more cards than a node has
        ("32xH100", "h100", 8, 4),
        ("64 H100s", "h100", 8, 8),
        ("16xRTX4090", "rtx-4090", 16, None),
        ("12xh100", "h100", 12, None),
        # words in another order, units of memory, and names that drivers report
        ("1xRTX 6000 Pro", "rtx-pro-6000", 1, None),
        ("8xA100-80GiB", "a100-80", 8, None),
        ("8xA100 80G", "a100-80", 8, None),
        ("1xA10G", "a10g", 1, None),
        ("1xNVIDIA A100 80GB PCIe", "a100-pcie-80", 1, None),
        ("8xNVIDIA H100 80GB HBM3", "h100", 8, None),
        ("8xNVIDIA B300 SXM6 AC", "b300", 8, None),
        ("1xNVIDIA GH200 480GB", "gh200", 1, None),
        ("1xAMD Instinct MI300X OAM", "mi300x", 1, None),
        ("1xMI250", "mi250", 1, None),
        # an x that belongs to the card
        ("2x7900xtx", "rx-7900-xtx", 2, None),
        ("7900xtxx2", "rx-7900-xtx", 2, None),
        ("2xRX 7900 XTX", "rx-7900-xtx", 2, None),
        ("8xMI350X", "mi350x", 8, None),
        ("8xAMD Instinct MI300X", "mi300x", 8, None),
        # other cards
        ("4xRTX PRO 6000 Blackwell", "rtx-pro-6000", 4, None),
        ("8xrtxpro6000", "rtx-pro-6000", 8, None),
        ("4xH100-NVL", "h100-nvl", 4, None),
        ("8xH20", "h20", 8, None),
        ("8xh800", "h800", 8, None),
        ("8xA800", "a800", 8, None),
        ("4xGB300", "gb300", 4, None),
        ("1xGB10", "gb10", 1, None),
        ("2x5080", "rtx-5080", 2, None),
        ("1x5070Ti", "rtx-5070-ti", 1, None),
        ("4xRTX 4080", "rtx-4080", 4, None),
        ("1x4070", "rtx-4070", 1, None),
        ("4x4060 Ti", "rtx-4060-ti", 4, None),
        ("2x3080", "rtx-3080", 2, None),
        ("1x3070", "rtx-3070", 1, None),
        ("2x3060", "rtx-3060", 2, None),
        ("1xA2000", "rtx-a2000", 1, None),
        ("2xA4000", "rtx-a4000", 2, None),
        ("4xA5000", "rtx-a5000", 4, None),
        ("72xgb200", "gb200", 72, None),
        ("8x8xgb200", "gb200", 8, 8),
        # nodes of clouds
        ("p5en", "h200", 8, None),
        ("2xp5en.48xlarge", "h200", 8, 2),
        ("p4de", "a100-80", 8, None),
        ("p6-b200", "b200", 8, None),
        ("g6e", "l40s", 8, None),
        ("g5", "a10g", 8, None),
        ("a3-mega", "h100", 8, None),
        ("a3-megagpu-8g", "h100", 8, None),
        ("a2-ultra", "a100-80", 8, None),
        ("ND H100 v5", "h100", 8, None),
        ("4xStandard_ND96isr_H100_v5", "h100", 8, 4),
        ("Standard_ND96amsr_A100_v4", "a100-80", 8, None),
        ("DGX Spark", "gb10", 1, None),
        ("DGX Spark x2", "gb10", 1, 2),
        ("DGX A100 80GB", "a100-80", 8, None),
        ("ml.p5.48xlarge", "h100", 8, None),
        # machines of clouds with fewer cards
        ("a2-highgpu-1g", "a100-40", 1, None),
        ("a3-highgpu-4g", "h100", 4, None),
        ("g5.12xlarge", "a10g", 4, None),
        ("2xg5.12xlarge", "a10g", 4, 2),
        ("p3.2xlarge", "v100-16", 1, None),
        ("g2-standard-24", "l4", 2, None),
        ("Standard_NC24ads_A100_v4", "a100-pcie-80", 1, None),
        ("Standard_ND96asr_v4", "a100-40", 8, None),
        ("BM.GPU.A100-v2.8", "a100-80", 8, None),
        ("2 DGX H100", "h100", 8, 2),
        ("Standard_NC6s_v3", "v100-16", 1, None),
        ("g7e.48xlarge", "rtx-pro-6000", 8, None),
        ("HGX H200", "h200", 8, None),
        ("4 HGX H100", "h100", 8, 4),
        ("Colab T4", "t4", 1, None),
        ("kaggle 2xT4", "t4", 2, None),
        # the cloud before it, and words between the numbers
        ("lambda gpu_8x_h100_sxm5", "h100", 8, None),
        ("AWS p5.48xlarge", "h100", 8, None),
        ("2 nodes of 8 H100", "h100", 8, 2),
        ("2 nodes x 8xA100-80GB", "a100-80", 8, 2),
        ("1x5060 Ti 16GB", "rtx-5060-ti", 1, None),
        ("4xRTX PRO 6000 Blackwell Max-Q", "rtx-pro-6000-max-q", 4, None),
        ("2x2080", "rtx-2080", 2, None),
        ("8xMI100", "mi100", 8, None),
    ],
)
def test_spellings_of_machines(text: str, card: str, devices: int, nodes: int | None) -> None:
    name, count = nodes_of(text)
    node = load_node(name).node
    assert (node.card, node.devices, count) == (card, devices, nodes)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7900xtx", "'rx-7900-xtx' is a card; say how many: 1xrx-7900-xtx or 8xrx-7900-xtx"),
        ("9060xt", "no node '9060xt'"),
        ("8xrtx9999", "no card 'rtx9999'"),
        ("9999xh100", "found 9999xh100; the number of cards of a node is from 1 to 1024"),
        ("0xh100", "found 0xh100; the number of cards of a node is from 1 to 1024"),
        ("8xv100", "no card 'v100'; say which: v100-16 or v100-32 or v100-pcie"),
        ("V100", "no node 'V100'; say which: v100-16 or v100-32 or v100-pcie"),
        ("p7", "no node 'p7'"),
        # names of several cards, and of cards that do not ship
        ("8xV100s", "no card 'V100s'; say which: v100-16 or v100-32 or v100-pcie or v100s-pcie"),
        ("RTX6000", "say which: rtx-6000-ada or rtx-pro-6000 or rtx-pro-6000-max-q"),
        ("2 4070s", "no card '4070s'; say which: rtx-4070 or rtx-4070-super"),
        ("1x4070 TiS", "no card '4070 TiS'; say which: rtx-4070-ti or rtx-4070-ti-super"),
        ("DGX A100", "no node 'DGX A100'; say which: dgx-a100-40 or dgx-a100-80"),
        ("1xRTX 3080 12GB", "no card 'RTX 3080 12GB'"),
        ("1xRTX 4090 D", "no card 'RTX 4090 D'"),
        ("1xTITAN", "no card 'TITAN'; say which: titan-rtx or titan-v"),
        ("4 DGX A100", "no card 'DGX A100'; say which: dgx-a100-40 or dgx-a100-80"),
        ("runpod a100", "no node 'a100'; say which: a100-40 or a100-80"),
        # other makers
        ("TPU v5e", "'TPU v5e' is no GPU of NVIDIA or AMD; name one, such as 1xh100"),
        ("v5litepod-8", "is no GPU of NVIDIA or AMD"),
        ("M3 Max", "is no GPU of NVIDIA or AMD"),
        ("8xGaudi2", "'Gaudi2' is no GPU of NVIDIA or AMD"),
        ("trn1.32xlarge", "is no GPU of NVIDIA or AMD"),
        ("g5g.xlarge", "no node 'g5g.xlarge'"),
    ],
)
def test_other_machines_are_refused(text: str, answer: str) -> None:
    name, _ = nodes_of(text)
    with pytest.raises(InputError, match=answer):
        load_node(name)


def test_five_lines_add_a_card(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no card 'mi999'.*8xmi999\.yaml, a file of five"
    ) as found:
        load_node("8xmi999")
    lines = str(found.value).splitlines()[1:]
    assert len(lines) == 5
    (tmp_path / "mi999.yaml").write_text("\n".join(lines))
    node = load_node(f"8x{tmp_path / 'mi999.yaml'}")
    assert (node.node.devices, node.card.memory_gib, node.card.peak("bf16")) == (8, 12, 31.9e12)


@pytest.mark.parametrize(
    ("text", "bandwidth", "note"),
    [
        ("2x8xh100", 400e9, "the network of dgx-h100, 400 GB/s each way."),
        ("2x4xh100", 200e9, "dgx-h100, 200 GB/s each way for 4 of its 8 cards."),
        ("8x8xgb200", 400e9, "gb200-nvl72, 400 GB/s each way for 8 of its 72 cards."),
        ("2x72xgb200", 3600e9, "the network of gb200-nvl72, 3600 GB/s each way."),
        ("2xp5en", 400e9, ""),
    ],
)
def test_nodes_get_the_network_of_one_that_ships(text: str, bandwidth: float, note: str) -> None:
    name, count = nodes_of(text)
    node, notes = joined_node(name, count or 1)
    assert node.network_bytes_per_second == bandwidth
    assert [one.endswith(note) for one in notes] == [True] * bool(note)


def test_clouds_have_cards_that_ship() -> None:
    instances = parse_yaml((ROOT / "src/shardmark/predict/hardware/instances.yaml").read_text(), "")
    names_of_all = [name for group in instances for name in group["cards"]]
    assert len(names_of_all) == len(set(names_of_all)) > 50
    for group in instances:
        assert group["source"]
        for name, cards in group["cards"].items():
            node = load_node(name).node
            assert f"{node.devices}x{node.card}" == cards


def test_72_cards_are_one_domain_of_nvlink() -> None:
    assert load_node("72xgb200").link_bytes_per_second(72) == 900e9


def test_a_card_of_several_memories_is_not_guessed() -> None:
    with pytest.raises(InputError, match="'a100'; say which: a100-40 or a100-80 or a100-pcie-40"):
        load_node("8xa100")


@pytest.mark.parametrize(
    ("name", "bf16", "memory_gib", "bandwidth", "link"),
    [
        ("a100-pcie-40", 312e12, 40, 1555e9, None),
        ("a100-pcie-80", 312e12, 80, 1935e9, None),
        ("rtx-a4000", 76.7e12, 16, 448e9, None),
        ("rtx-a4500", 94.6e12, 20, 640e9, None),
        ("rtx-4000-ada", 106.9e12, 20, 360e9, None),
        ("rtx-5000-ada", 261.1e12, 32, 576e9, None),
        ("rtx-4500-ada", 158.5e12, 24, 432e9, None),
        ("rtx-5060-ti", 47.4e12, 16, 448e9, None),
        ("rtx-pro-5000", 258e12, 48, 1344e9, None),
        ("mi100", 92.3e12, 32, 1228.8e9, None),
        ("rx-9070-xt", 195e12, 16, 640e9, None),
        ("rtx-3070", 40.6e12, 8, 448e9, None),
        ("gh200", 989.5e12, 96, 4000e9, 450e9),
        ("gb200", 2500e12, 186, 8000e9, 900e9),
        ("b300", 2250e12, 268, 8000e9, 900e9),
        ("mi325x", 1307.4e12, 256, 6000e9, 448e9),
        ("mi355x", 2516.6e12, 288, 8000e9, 537.6e9),
        ("h20", 148e12, 96, 4000e9, 450e9),
        ("h800", 989.5e12, 80, 3350e9, 200e9),
        ("a800", 312e12, 80, 2039e9, 200e9),
    ],
)
def test_published_figures(
    name: str, bf16: float, memory_gib: float, bandwidth: float, link: float | None
) -> None:
    """Dense peaks, as the data sheets of the makers have them."""
    card = load_card(name)
    figures = (card.peak("bf16"), card.memory_gib, card.memory_bytes_per_second)
    assert figures == (bf16, memory_gib, bandwidth)
    assert card.link_bytes_per_second == link


@pytest.mark.parametrize(
    ("name", "gib", "bandwidth"),
    [
        ("t4", 15, 256e9),
        ("a2", 15, 160e9),
        ("a10g", 22.5, 480e9),
        ("k80", 11.25, 192e9),
        ("rtx-a6000", 48, 768e9),
    ],
)
def test_check_bits_take_memory_and_bandwidth(name: str, gib: float, bandwidth: float) -> None:
    """Drivers report 15,360 MiB for a T4 and 23,028 for an A10G, less what they hold."""
    card = load_card(name)
    assert (card.usable_bytes / 2**30, card.bandwidth) == (gib, bandwidth)


def test_turing_has_no_bf16() -> None:
    assert load_card("rtx-8000").peak("fp16") == 130.5e12
    with pytest.raises(InputError, match="no bf16"):
        load_card("rtx-8000").peak("bf16")


@pytest.mark.parametrize(
    ("name", "fp8"),
    [("h100", 1979e12), ("b200", 4500e12), ("rtx-4090", 330.3e12), ("mi355x", 5033.2e12)],
)
def test_published_peaks_of_8_bits(name: str, fp8: float) -> None:
    assert load_card(name).peak("fp8") == fp8


def test_ampere_has_no_fp8() -> None:
    for name in ("a100-80", "rtx-a4000"):
        with pytest.raises(InputError, match=r"no fp8.*use bf16, or another card"):
            load_card(name).peak("fp8")


def test_a_measured_node_is_read_back(tmp_path: Path) -> None:
    record = present(read_network(GOLDEN))
    speed = RankSpeed(
        flops_per_second={"fp32": 1e11, "bf16": 3e11},
        memory_bytes_per_second=1e10,
        operation_seconds=5e-6,
        shared=0.4,
    )
    fitted = with_fits(record).model_copy(update={"speed": speed})
    write_node(
        tmp_path / "here.yaml",
        fitted,
        device="cpu",
        memory_gib=8,
        source="measured",
    )
    node, constants = load_node(str(tmp_path / "here.yaml")), Constants()
    assert node.node.devices == 1  # on each of two hosts
    assert node.card.peak("fp32") * constants.core_share == pytest.approx(1e11)
    assert node.card.peak("bf16") * constants.product_share == pytest.approx(3e11)
    (all_reduce,) = (each for each in fitted.operations if each.operation == "all_reduce")
    assert all_reduce.fit is not None
    network = node.network_bytes_per_second * constants.network_share
    assert network == pytest.approx(all_reduce.fit.bytes_per_second.value)
    assert node.node.network_latency_seconds == all_reduce.fit.latency_seconds.value
    assert node.node.shared_speed == 0.4
    assert node.card.operation_seconds == 5e-6
    timed = node.node.network_seconds["all_reduce"]
    assert timed.ranks == len(all_reduce.ranks)
    assert [*timed.seconds] == [size.payload_bytes for size in all_reduce.sizes]
    assert sorted(timed.seconds.values()) == [*timed.seconds.values()]


def test_between_measured_sizes_time_follows_powers() -> None:
    timed = Timed(ranks=2, seconds={1000: 1e-3, 100_000: 1e-2})
    assert timed.seconds_of(10) == 1e-3
    assert timed.seconds_of(10_000) == pytest.approx(10**-2.5)
    assert timed.seconds_of(200_000) == pytest.approx(2e-2)


def test_speeds_are_those_of_the_fastest_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SIDE", 64)
    monkeypatch.setattr(speed, "COPIED_BYTES", 2**16)
    threads = torch.get_num_threads()
    found = speed.measure_speed(torch.device("cpu"), 1)
    assert torch.get_num_threads() == threads
    assert 1e6 < found.flops_per_second["fp32"] < 1e14
    assert 1e6 < found.memory_bytes_per_second < 1e14
    assert 1e-8 < present(found.operation_seconds) < 1e-2


def test_write_goes_with_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--write", str(tmp_path / "here.yaml")]) == 2
    assert "--write: found without --network" in capsys.readouterr().err


def test_nodes_of_a_single_card_are_asked_for_their_cards() -> None:
    with pytest.raises(InputError, match="say the cards of a node, as 2x8xh100"):
        nodes_of("2 nodes of h100")
    assert nodes_of("2 nodes of 8 H100")[1] == 2
