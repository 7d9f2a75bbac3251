"""The README's table of claims: from raw figures, or as it was."""

import json
from pathlib import Path

from claims import CLAIMS, rows_of

README = """
<!-- begin claims -->
|  | measured |  |
| --- | --- | --- |
| One rank of four is killed | everybody goes on: a (0.1 s); b | [table](benchmarks/RESULTS.md#kill) |
| Slow links | fast | [table](benchmarks/RESULTS.md#throughput-main) |
<!-- end claims -->
"""


def measured(raw: Path, where: str = "a processor, 2 cores, 24 GiB") -> dict[str, str]:
    return {
        name: row[1] for (_, name, _), row in zip(CLAIMS, rows_of(README, raw, where), strict=True)
    }


def test_a_claim_without_raw_figures_keeps_its_row(tmp_path: Path) -> None:
    found = measured(tmp_path)
    assert found["kill"] == "everybody goes on: a (0.1 s); b"
    assert found["throughput-main"] == "fast"
    assert found["scaling"] == "not measured yet"


def test_raw_figures_replace_what_was_there(tmp_path: Path) -> None:
    lines = [
        {"peer": "adpsgd:graph=ring", "results": [[3, 0.25, "100%"], [3, 0.5, "90%"]]},
        {"peer": "torch DDP", "results": [[0, 0.0, "end"]]},
    ]
    (tmp_path / "kill.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measured(tmp_path)
    assert found["kill"] == "survivors go on (longest gap): adpsgd:graph=ring (0.50 s); peers: none"
    assert found["throughput-main"] == "fast"
    assert (
        measured(tmp_path, "a processor, 16 cores, 24 GiB")["kill"]
        == "everybody goes on: a (0.1 s); b"
    )
    row = rows_of(README, tmp_path, "a processor, 2 cores, 24 GiB")[
        [name for _, name, _ in CLAIMS].index("kill")
    ]
    assert row[::2] == [
        "One rank of four is killed (2 rounds)",
        "[table](benchmarks/RESULTS.md#kill)",
    ]


def test_a_machine_of_another_size_has_figures_and_sections_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "kill-16-cores.jsonl").write_text(
        '{"peer": "torch DDP", "results": [[0, 0.0, "end"]]}\n'
    )
    row = rows_of(README, tmp_path, "a processor, 16 cores, 24 GiB")[
        [name for _, name, _ in CLAIMS].index("kill")
    ]
    assert row == [
        "One rank of four is killed (one round)",
        "survivors go on (longest gap): none; peers: none",
        "[table](benchmarks/RESULTS.md#kill-16-cores)",
    ]


def test_figures_of_a_larger_machine_stand_below_those_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "kill-16-cores.jsonl").write_text(
        '{"peer": "torch DDP", "results": [[0, 0.0, "end"]]}\n'
    )
    rows = rows_of(README, tmp_path, "a processor, 2 cores, 24 GiB")
    place = [row[0] for row in rows].index("One rank of four is killed")
    assert rows[place][1] == "everybody goes on: a (0.1 s); b"
    assert rows[place + 1] == [
        "One rank of four is killed, on 16 cores (one round)",
        "survivors go on (longest gap): none; peers: none",
        "[table](benchmarks/RESULTS.md#kill-16-cores)",
    ]


def test_a_round_that_failed_does_not_decide_a_claim(tmp_path: Path) -> None:
    speeds = {
        "no communication": [100.0, 100.0, 100.0],
        "torch DDP": [60.0, 60.0, 60.0],
        "daso:period=4,delay=1": [float("nan"), 80.0, 90.0],
        "delay-by-one:replica=node": [70.0, 70.0, 70.0],
        "adpsgd:graph=ring": [99.0, 99.0, 99.0],
    }
    lines = [
        {"case": "500 Mbit/s", "peer": peer, "speeds": found} for peer, found in speeds.items()
    ]
    (tmp_path / "throughput-main.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert measured(tmp_path)["throughput-main"].startswith(
        "`daso:period=4,delay=1` 85.0%, `delay-by-one:replica=node` 70.0%, `adpsgd:graph=ring` "
        "99.0%"
    )


def test_the_slowest_link_has_a_claim_of_its_own(tmp_path: Path) -> None:
    shares = {
        "no communication": 1.0,
        "torch DDP": 0.1,
        "daso:period=8,delay=4": 0.77,
        "adpsgd:graph=ring": 0.97,
    }
    lines = [
        {"case": "50 Mbit/s", "peer": peer, "speeds": [100 * share]}
        for peer, share in shares.items()
    ]
    lines += [{"case": "500 Mbit/s", "peer": peer, "speeds": [1.0]} for peer in shares]
    (tmp_path / "throughput-bandwidth.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert measured(tmp_path)["throughput-bandwidth"] == (
        "`adpsgd:graph=ring` 97%, `daso:period=8,delay=4` 77% of the speed without "
        "communication; best peer: torch DDP, 10%; torch DDP 10%"
    )


def test_whoever_never_gets_there_is_not_named_as_the_best(tmp_path: Path) -> None:
    curves = {"adpsgd:graph=ring": [[0.1, 0.2]], "torch DDP": [[0.5, 0.9]]}
    lines = [
        {"rate": "100mbit", "peer": peer, "curves": c, "target": 0.8} for peer, c in curves.items()
    ]
    (tmp_path / "time-to-accuracy-digits.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert measured(tmp_path)["time-to-accuracy-digits"] == (
        "100mbit: none of ours gets there; best peer: torch DDP, 0.50 s"
    )


def test_a_tie_is_called_one(tmp_path: Path) -> None:
    curves = {"adpsgd:graph=ring": [[0.1, 0.9]], "torch DDP": [[0.5, 0.9]]}
    lines = [
        {"rate": "100mbit", "peer": peer, "curves": c, "target": 0.8} for peer, c in curves.items()
    ]
    (tmp_path / "time-to-accuracy-digits.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert measured(tmp_path)["time-to-accuracy-digits"] == (
        "100mbit: a tie, `adpsgd:graph=ring` and torch DDP 0.50 s"
    )
