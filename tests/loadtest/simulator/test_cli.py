"""

What is compared, as written on a command line.

Rounds of a simulation: what differs between them, and what does not.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from loadtest.generated import Agents
from loadtest.simulator import Setup, cli, rounds
from loadtest.simulator.arms import arms_of, serve_flags
from loadtest.simulator.rounds import half_of_the_blocks, simulate_rounds, varied
from policies import POLICIES
from router.scheduling.waiting import QueueRules


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.simulate, args, env={"COLUMNS": "200"})


SMALL = ("--generate", "siblings", "--sessions", "3", "--replicas", "2")


def test_a_table_and_its_figures() -> None:
    """A row for each policy, and the same in JSON."""
    args = (*SMALL, "--policies", "kv_aware,random", "--pool-speed", "5")

    result, printed = run(*args), run(*args, "--json")

    assert result.exit_code == printed.exit_code == 0, result.output
    assert "closed loop, load 0.9; 2 replicas (h100x4-70b)" in " ".join(result.output.split())
    figures = msgspec.json.decode(printed.stdout)
    assert [found["label"] for found in figures["results"]] == ["kv_aware", "random"]
    assert figures["setup"]["pool"]["speed"] == 5.0
    for found in figures["results"]:
        assert f"{found['label']} " in result.output
        assert f" {found['summary']['ttft_mean_s']:,.2f} " in result.output
        assert found["summary"]["num_errors"] == 0


def test_halves_have_a_table_and_figures_of_their_own() -> None:
    """How many prompts were computed apart, and how busy each half was."""
    args = ("--generate", "siblings", "--sessions", "3", "--prefill", "1", "--decode", "2")

    result = run(*args, "--policies", "kv_aware")

    assert result.exit_code == 0, result.output
    assert "1 prefill and 2 decode replicas (h100x4-70b)" in " ".join(result.output.split())
    [found] = msgspec.json.decode(run(*args, "--policies", "kv_aware", "--json").stdout)["results"]
    assert f" {100 * found['decode_busy_ratio']:.1f} " in result.output
    assert [use["role"] for use in found["replicas"]] == ["prefill", "decode", "decode"]


def test_every_policy_by_default() -> None:
    """Without --policies all are simulated."""
    result = run(*SMALL)

    assert result.exit_code == 0, result.output
    for name in ("random", "session_hash", "mooncake", "kv_aware"):
        assert f" {name} " in result.output


def test_a_cpu_tier_has_a_column_of_its_own() -> None:
    """In place of the pool's; the title says how large and how fast it is."""
    args = ("--blocks", "400", "--cpu-blocks", "9000", "--cpu-speed", "4")
    result = run(*SMALL, "--policies", "kv_aware", *args)

    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "CPU tier of 9,000 blocks 4x" in text
    assert "CPU %" in text
    assert "pool %" not in text


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("--policies", "kv_awar"), "did you mean 'kv_aware'"),
        (("--pool-links", "2"), "only with --pool-speed"),
        (("--cpu-speed", "2"), "--cpu-speed only with --cpu-blocks"),
        (("--cpu-blocks", "9", "--pool-speed", "5"), "--cpu-blocks: not with --pool-speed"),
        (("--cpu-blocks", "0"), "--cpu-blocks"),
        (("--load", "nan"), "not a number"),
        (("--prefill", "2"), "--prefill and --decode need each other"),
        (("--transfer-speed", "9"), "only with --prefill"),
        (("--replicas", "0"), "only beside"),
        (("--prefill", "1", "--decode", "1", "--no-decode"), "--decode and --no-decode"),
        (("--prefill", "1", "--decode", "1", "--transfer-speed", "9", "--pool-speed", "5"), "with"),
        (("--load", "0"), "--load"),
        (("--max-num-seqs", "300", "--max-num-batched-tokens", "200"), "--max-num-seqs is above"),
        (("--engine", "abacus"), "h100x4-70b"),
        (("--trace", "nowhere.jsonl"), "--trace"),
    ],
)
def test_wrong_input_is_two(args: tuple[str, ...], error: str) -> None:
    """Exit status 2, and the message says what is wrong."""
    result = run(*SMALL, *args)

    assert result.exit_code == 2
    assert error in result.output


def test_a_bad_trace_is_named(tmp_path: Path) -> None:
    """File, line and field are in the message."""
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": [1]}\n')

    result = run("--trace", str(trace))

    assert result.exit_code == 2
    assert "bad.jsonl" in result.output
    assert "input_length" in result.output


def test_stopped_it_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves the policies that are done, and status 1."""
    simulate_one = rounds.simulate

    def stopped_at_random(*args: object, label: str, **more: object) -> object:
        if label == "random":
            raise KeyboardInterrupt
        return simulate_one(*args, label=label, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(rounds, "simulate", stopped_at_random)

    result = run(*SMALL, "--policies", "kv_aware,random,least_loaded")

    assert result.exit_code == 1
    assert "kv_aware " in result.output
    assert "stopped: 1 of 3 simulations are done" in result.output


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A directory that cannot be made is an error, after the table."""
    (tmp_path / "file").touch()
    result = run(*SMALL, "--policies", "random", "-o", str(tmp_path / "file" / "runs"))

    assert result.exit_code == 1
    assert "cannot write" in result.output


def test_policies_with_their_parameters() -> None:
    """A comma before NAME=VALUE belongs to the policy before it."""
    arms = arms_of(["kv_aware, prefix_hash:load_factor=2,num_points=4", "least_loaded"])

    assert [arm.label for arm in arms] == [
        "kv_aware",
        "prefix_hash:load_factor=2,num_points=4",
        "least_loaded",
    ]
    assert arms[1].params == {"load_factor": "2", "num_points": "4"}
    assert arms[1].make_policy() != arms[0].make_policy()
    assert serve_flags(arms[1]) == [
        "--policy", "prefix_hash",
        "--policy-param", "load_factor=2", "--policy-param", "num_points=4",
    ]  # fmt: skip
    assert [arm.policy for arm in arms_of(["all"])] == list(POLICIES)


def test_arms_may_differ_in_their_queue() -> None:
    """Simulated as a router of the policy has it; a key of the queue switches it on or off."""
    specs = "kv_aware,least_loaded,kv_aware:queue.mode=off,least_loaded:queue.fill=0.5"
    default, other, off, filled = arms_of([specs])

    assert (default.queue_rules(), other.queue_rules()) == (QueueRules(), None)
    assert (off.queue_rules(), filled.queue_rules()) == (None, QueueRules(fill=0.5))
    assert filled.params == {}
    assert serve_flags(default) == ["--policy", "kv_aware"]
    assert serve_flags(off)[2:] == ["--queue", "off"]
    assert serve_flags(filled)[2:] == ["--queue", "on", "--set", "queue.fill=0.5"]


def test_unlimited_is_kv_aware_on_caches_that_never_evict() -> None:
    """The limit of what a router can do, as one more variant; `all` does not name it."""
    (limit,) = arms_of(["unlimited"])

    assert (limit.policy, limit.is_unlimited, limit.queue_rules()) == (
        "kv_aware",
        True,
        QueueRules(),
    )
    assert not any(arm.is_unlimited for arm in arms_of(["all"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv_aware:queue.full=1", "did you mean 'queue.fill'"),
        ("kv_aware:queue.fill=-1", "queue: Expected `float` >= 0.1"),
        ("kv_aware:queue.mode=maybe", "queue: Invalid enum value"),
        ("kv_awear", "did you mean 'kv_aware'"),
        ("kv_aware:alpa=1", "did you mean 'alpha'"),
        ("kv_aware:alpha", "is not PARAM=VALUE"),
        ("kv_aware:alpha=much", "alpha"),
        ("random,random", "named twice"),
        ("all,random", "named twice"),
        (" , ", "no policy is named; there are: "),
    ],
)
def test_wrong_policies_are_refused(text: str, said: str) -> None:
    """The message has the nearest known name."""
    with pytest.raises(ValueError, match=said):
        arms_of([text])


WORKLOAD = Agents(num_sessions=6, num_turns=2, scale_tokens=0.05).workload()


def test_a_varied_workload_is_the_same_but_for_bytes_and_a_millisecond() -> None:
    """Same turns, same repeats, at most 1 ms later; the first round is the workload itself."""
    other = varied(WORKLOAD, 2, seed=1)

    assert varied(WORKLOAD, 1, seed=1) is WORKLOAD
    assert other == varied(WORKLOAD, 2, seed=1)
    before = {turn.key: turn for turn in WORKLOAD.turns}
    renamed: dict[int, int] = {}
    for turn in other.turns:
        was = before.pop(turn.key)
        assert (turn.num_input_tokens, turn.after) == (was.num_input_tokens, was.after)
        assert 0.0 <= turn.arrival_s - was.arrival_s <= 1e-3
        for old, new in zip(was.hash_ids, turn.hash_ids, strict=True):
            assert renamed.setdefault(old, new) == new
    assert not before
    assert len(set(renamed.values())) == len(renamed)
    assert renamed.keys().isdisjoint(renamed.values())


def test_rounds_differ_a_little_and_repeat_exactly() -> None:
    """Seeded: the same round is the same run; another one is another."""
    arms = arms_of(["least_loaded"])
    setup = Setup(num_replicas=2, load=2.0)

    (one, two), is_complete = simulate_rounds(WORKLOAD, arms, setup, 2)
    (again,), _ = simulate_rounds(WORKLOAD, arms, setup)

    assert is_complete
    assert one.run == again.run
    assert one.run.turns != two.run.turns
    assert (one.run.info.round, two.run.info.round) == (1, 2)
    assert two.run.info.workload == WORKLOAD.name


def test_unlimited_never_evicts_and_the_queue_is_the_routers() -> None:
    """`kv_aware` has its queue, `queue.mode=off` has none."""
    setup = Setup(num_replicas=2, num_blocks=half_of_the_blocks(WORKLOAD, 2), load=2.0)

    done, _ = simulate_rounds(
        WORKLOAD, arms_of(["kv_aware,kv_aware:queue.mode=off,unlimited"]), setup
    )

    assert [one.setup.queue is not None for one in done] == [True, False, True]
    assert sum(use.num_evicted_blocks for use in done[0].replicas) > 0
    assert sum(use.num_evicted_blocks for use in done[2].replicas) == 0
