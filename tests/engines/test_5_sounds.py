"""Sound in front of real engines: turns of conversations, predicted as they are reported."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.harness import (
    BLOCK_SIZE,
    Engine,
    Router,
    all_up,
    engine_python,
    wait_until,
)
from tests.vision_model import make_vision_model, sound_part, wav

Json = dict[str, Any]


@pytest.fixture(scope="module")
def hearing(log_dir: Path) -> Iterator[Router]:
    """Run a router in front of two engines whose model hears."""
    command = [engine_python(), "-c", "import soundfile"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the engines' Python has no soundfile: pip install 'vllm[audio]'")
    model = make_vision_model(log_dir / "hearing", "qwen2_audio")
    engines = [Engine(name, log_dir, options=("--model", str(model))) for name in ("h1", "h2")]
    with all_up(engines), Router(engines, log_dir) as router:
        yield router


def ask(router: Router, body: Json) -> tuple[str, int, int, int]:
    """Send a turn; return where it went, its tokens, how many were predicted and reported cached.

    Ends when what the turn stored is known, under the names that its sounds have.
    """
    answer = router.chat({**body, "max_tokens": 1, "temperature": 0})
    assert answer.status_code == 200, answer.text
    usage, replica = answer.json()["usage"], answer.headers["x-warmroute-replica"]
    num_tokens, reported = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    predicted = int(answer.headers["x-warmroute-cached"].split(";")[0].removeprefix("gpu="))
    settled = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    wait_until(
        lambda: router.num_known_tokens(body)[replica] == settled, 20, f"{settled} to be known"
    )
    return replica, num_tokens, predicted, reported


def turns(name: str, said: Sequence[Sequence[Json]]) -> list[Json]:
    """Write a conversation whose turns bring sounds, or none."""
    messages: list[Json] = [{"role": "system", "content": f"You listen to {name}. " * 20}]
    made = []
    for number, sounds in enumerate(said):
        text = {"type": "text", "text": f"What is said in {number}? " * 5}
        messages = [*messages, {"role": "user", "content": [*sounds, text]}]
        made.append({"model": "tiny", "messages": messages})
        messages = [*messages, {"role": "assistant", "content": "A word."}]
    return made


def stereo(num_s: float, seed: int) -> Json:
    """Make a sound whose name is not computed here."""
    return sound_part(wav(num_s, seed, num_channels=2))


def test_turns_with_sound_are_predicted(hearing: Router) -> None:
    """Sounds whose names are computed, several in a message; also at another replica."""
    sessions = [
        turns("named", [[sound_part(wav(1.0, 3))], [], [sound_part(wav(3.1, 4), is_url=True)], []]),
        turns("short", [[sound_part(wav(0.1, seed)) for seed in (7, 8, 9)], [], [], []]),
        turns("mine", [[sound_part(wav(2.0, 1), uuid="mine")], [], [], []]),
    ]
    seen: set[str] = set()
    num_turns = num_reused = 0
    for turn in range(4):
        if turn == 3:
            hearing.drain("r1")  # all go on at the other replica
        for session in sessions:
            replica, num_tokens, predicted, reported = ask(hearing, session[turn])

            assert predicted == reported
            assert len(hearing.explain(session[turn])["token_ids"]) == num_tokens
            seen.add(replica)
            num_turns += 1
            num_reused += reported > BLOCK_SIZE
    hearing.drain("r1", draining=False)
    assert seen == {"r1", "r2"}
    assert num_reused >= 6  # a first turn, or one at the other replica, may reuse nothing
    assert hearing.metric("warmroute_audited_total", result="exact") == num_turns
    assert hearing.metric("warmroute_token_mismatches_total") == 0
    assert not hearing.metric("warmroute_tokenized_requests_total", way="prefix")


def test_sound_without_a_name_stays_at_its_replica(hearing: Router) -> None:
    """The engine reuses the last turn there. Nothing is predicted, so no prediction is wrong."""
    sounds = [stereo(2.0, 11), stereo(1.3, 12)]
    exact = hearing.metric("warmroute_audited_total", result="exact")
    homes = set()
    for number, body in enumerate(turns("stereo", [[sounds[0]], [], [sounds[1]], []])):
        answer = hearing.chat({**body, "max_tokens": 1, "temperature": 0})
        assert answer.status_code == 200, answer.text
        homes.add(answer.headers["x-warmroute-replica"])
        usage = answer.json()["usage"]

        if number:
            assert "x-warmroute-cached" not in answer.headers
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0.5 * usage["prompt_tokens"]
    assert len(homes) == 1
    assert hearing.metric("warmroute_audited_total", result="exact") <= exact + 1
    assert hearing.metric("warmroute_audited_total", result="over") == 0
    assert hearing.metric("warmroute_audited_total", result="under") == 0


@pytest.mark.parametrize(
    "part",
    [
        sound_part(b"no sound"),
        sound_part(wav(0.001)),
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,%%%"}},
        {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/a.wav"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "smell", "smell": {"url": "x"}},
    ],
    ids=["no-sound", "too-short", "no-base64", "address", "empty", "video", "smell"],
)
def test_what_is_no_sound_gets_the_engines_answer(hearing: Router, part: Json) -> None:
    """The same status and words as past the router; the next one is known as ever."""
    body = {**turns("hostile", [[part]])[0], "max_tokens": 1}
    there = httpx.post(f"{_urls_of(hearing)[0]}/v1/chat/completions", json=body, timeout=60)

    answer = hearing.chat(body)

    assert answer.status_code == there.status_code >= 400
    assert hearing.metric("warmroute_token_mismatches_total") == 0


def _urls_of(router: Router) -> list[str]:
    """Ask a router for the addresses of its replicas."""
    listed = httpx.get(f"{router.admin_url}/admin/replicas", timeout=30).json()
    return [each["url"] for each in listed["replicas"]]
