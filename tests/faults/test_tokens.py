"""Tokenizers that are missing, wrong, or refuse what the engine accepts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import orjson
import pytest
from aiohttp import web

from router.api.openai import TokenIds
from router.request import tokenize
from router.tokens.encoder import FastEncoderFailed, TextEncoder
from tests.faults.fake_engine import FakeEngine
from tests.faults.models import model_dir
from tests.faults.stage import Engines, arm, chat, on_stage, streamed, words


@pytest.mark.parametrize("broken", ["missing", "nonsense"])
async def test_without_a_tokenizer_the_engine_tokenizes(tmp_path: Path, broken: str) -> None:
    """Through `/tokenize`; predictions are as exact, and the log says why."""
    folder = model_dir(tmp_path / "m", without="tokenizer.json")
    if broken == "nonsense":
        (tmp_path / "m" / "tokenizer.json").write_text("{")
    async with Engines(2) as engines, on_stage(*engines, tokens__models={"tiny": folder}) as stage:
        first = await stage.ask(chat(words(1)))
        await stage.settled(*engines)
        second = await stage.ask(streamed(chat(words(1), first.text, words(2))))

        assert second.replica == first.replica
        assert second.predicted == second.reported > 0
        assert "the engine must tokenize" in stage.log
        assert stage.metric("warmroute_tokenized_requests_total", way="engine") == 2


async def test_gpt_oss_chats_are_never_tokenized_by_the_engine() -> None:
    """If they are suspect, they have no ids: `/tokenize` renders a template, which chats do not."""
    settings = {"tokens__tokenizer_modes": {"tiny": "harmony"}}
    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:
        for _ in range(2):  # this engine counts other tokens
            assert (await stage.ask(chat(words(1)))).status == 200

        assert stage.metric("warmroute_tokenized_requests_total", way="local") == 1
        assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 1
        assert stage.metric("warmroute_tokenized_requests_total", way="engine") == 0


async def test_without_a_tokenizer_every_prompt_is_served(tmp_path: Path) -> None:
    """Text, ids, batches; what the engine will not tokenize is routed without tokens."""
    folder = model_dir(tmp_path / "m", without="tokenizer.json")
    prompts = ["text", [1, 2, 3], ["text", "more"], [[1, 2], [3]], ["one"]]
    async with Engines(1) as engines, on_stage(*engines, tokens__models={"tiny": folder}) as stage:
        for prompt in prompts:
            reply = await stage.ask({"model": "tiny", "prompt": prompt}, "/v1/completions")
            assert reply.status == 200, prompt
        refused = await stage.ask(chat("a", add_generation_prompt=1, temperature=-1))

        assert refused.status == 400
        assert "temperature" in refused.error["message"]


async def test_an_engine_that_does_not_tokenize_in_time_costs_a_match_only() -> None:
    """Late, failing, or answering nonsense: the request goes on without tokens."""
    pages: list[object] = [(500, ""), (404, ""), {"tokens": "x"}, (200, "["), (400, "{}")]
    async with FakeEngine() as engine:
        engine.pages["/tokenize"] = (500, "")
        settings = {"tokens__models": {"tiny": "/nowhere"}, "tokens__engine_timeout_s": 0.1}
        async with on_stage(engine, **settings) as stage:
            for page in pages:
                engine.pages["/tokenize"] = page
                assert (await stage.ask(chat("a"))).status == 200
            del engine.pages["/tokenize"]

            async def hangs_there(request: web.Request) -> web.StreamResponse:
                if request.path == "/tokenize":
                    await engine.left.wait()
                return web.json_response({})

            engine.on_request, engine.tokenizes = hangs_there, True
            assert (await stage.ask(chat("a"))).status == 200
            assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 6


async def test_a_wrong_template_is_found_by_the_first_answer(tmp_path: Path) -> None:
    """Its count is not the engine's: from there on the engine tokenizes, exactly."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = model_dir(tmp_path / "m", template=template)
    async with Engines(1) as engines, on_stage(*engines, tokens__models={"tiny": folder}) as stage:
        await stage.ask(chat(words(1)))
        await stage.settled(*engines)
        second = await stage.ask(chat(words(1)))

        assert stage.metric("warmroute_token_mismatches_total", against="usage") == 1
        assert second.predicted == second.reported > 0
        assert stage.metric("warmroute_tokenized_requests_total", way="engine") == 1
        assert "tokens differ from the engine's" in stage.log


async def test_one_replica_that_lies_about_usage_ends_nothing() -> None:
    """Two others count as we do: all prompts stay exact, the liar is counted and logged once."""

    async def lie(_: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
        return web.json_response({"choices": [], "usage": usage})

    async with Engines(2) as engines, FakeEngine(lie) as liar:
        async with on_stage(liar, *engines, policy__name="round_robin") as stage:
            for number in range(9):
                assert (await stage.ask(chat(words(number)))).status == 200

            assert stage.metric("warmroute_token_mismatches_total", against="usage") == 3
            assert stage.metric("warmroute_tokenized_requests_total", way="local") == 9
            assert (
                stage.log.count("replica counts other tokens than the rest") == 2
            )  # as text, as JSON


async def test_a_template_that_refuses_what_the_engine_accepts_fails_no_request(
    tmp_path: Path,
) -> None:
    """The engine has the last word until its counts have proven the template to be its own."""
    folder = model_dir(tmp_path / "m", template="{{ raise_exception('no: ' ~ messages) }}")
    async with Engines(1) as engines, on_stage(*engines, tokens__models={"tiny": folder}) as stage:
        first = await stage.ask(chat(words(1)))
        await stage.settled(*engines)
        second = await stage.ask(chat(words(1)))

        assert (first.status, second.status) == (200, 200)
        assert stage.metric("warmroute_token_mismatches_total", against="template") == 1
        assert second.predicted == second.reported > 0


async def test_a_sample_is_proven_beside_the_requests() -> None:
    """Whole encodes agree with the pieces; they are off the loop and one at a time."""
    async with Engines(1) as engines, on_stage(*engines, tokens__prove_ratio=1.0) as stage:
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        texts = [words(1)]
        for number in range(5):
            reply = await stage.ask(chat(*texts))
            texts += [reply.text, words(number + 2)]
            await stage.until(lambda: prompter.trust.num_proofs == number + 1)  # noqa: B023

        assert prompter.trust.num_proofs == 5
        assert stage.metric("warmroute_token_mismatches_total") == 0


class _Liar:
    """An encoder in the place of fastokens whose ids are not those of `tokenizers`."""

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        return [array("I", list(each.encode())) for each in texts]


async def test_fastokens_is_used_once_it_is_proven() -> None:
    """Requests do not wait for it; its ids are the engine's, and those of whole encodes."""
    settings = {"tokens__encoder": "auto", "tokens__prove_ratio": 1.0}
    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        await stage.until(lambda: prompter.encoder.is_fast)
        first = await stage.ask(chat(words(1, 2000)))
        await stage.settled(*engines)
        second = await stage.ask(chat(words(1, 2000), first.text, words(2)))
        await stage.until(lambda: prompter.trust.num_proofs > 0)

        assert second.predicted == second.reported > 0
        assert prompter.encoder.is_fast
        assert "fastokens proven" in stage.log


@pytest.mark.parametrize("is_counted_alike", [True, False])
async def test_fastokens_is_given_up_at_the_first_difference(is_counted_alike: bool) -> None:
    """A sample finds it, or the engine's count; the next prompt is exact, by `tokenizers`."""
    async with Engines(1) as engines, on_stage(*engines, tokens__prove_ratio=1.0) as stage:
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        encoder = prompter.encoder
        assert isinstance(encoder, TextEncoder)
        encoder.fast = _Reversed(encoder) if is_counted_alike else _Liar()  # type: ignore[assignment]
        await stage.ask(chat(words(1)))
        await stage.until(lambda: not prompter.encoder.is_fast)
        await stage.settled(*engines)
        second = await stage.ask(chat(words(1)))

        assert second.predicted == second.reported > 0
        assert stage.metric("warmroute_encoder_fallbacks_total", reason="sample") == 1
        assert stage.metric("warmroute_tokenized_requests_total", way="local") == 2
        assert stage.log.count("fastokens is replaced") == 2  # as text, as JSON


class _Reversed:
    """Right in number, wrong in order."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        whole = self._encoder.encode_whole
        return [whole(each, add_special_tokens=False)[::-1] for each in texts]


async def test_fastokens_that_breaks_down_fails_no_request() -> None:
    """The prompt in its hands is encoded by `tokenizers`; it is counted and logged once."""

    class Broken:
        def encode(self, texts: Sequence[str]) -> list[TokenIds]:
            raise FastEncoderFailed("PanicException")

    async with Engines(1) as engines, on_stage(*engines) as stage:
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        assert isinstance(prompter.encoder, TextEncoder)
        prompter.encoder.fast = Broken()  # type: ignore[assignment]
        replies = [await stage.ask(chat(words(1))) for _ in range(3)]

        assert [reply.status for reply in replies] == [200, 200, 200]
        assert stage.metric("warmroute_encoder_fallbacks_total", reason="failed") == 1
        assert stage.metric("warmroute_token_mismatches_total") == 0


async def test_a_library_that_panics_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of Rust is no `Exception`; the prompt is routed without tokens, and counted so."""
    panic = type("PanicException", (BaseException,), {})
    async with Engines(1) as engines, on_stage(*engines) as stage:
        monkeypatch.setattr(TextEncoder, "encode", mock.Mock(side_effect=panic("it quotes text")))
        reply = await stage.ask(chat(words(1)))

        assert reply.status == 200
        assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 1
        assert "it quotes text" not in stage.log


async def test_long_prompts_are_encoded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are as exact."""
    monkeypatch.setattr(tokenize, "INLINE_CHARS", 100)
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(chat(words(1, 2000)))
        await stage.settled(*engines)
        reply = await stage.ask(chat(words(1, 2000), "ok", words(2, 2000)))

        assert reply.predicted == reply.reported > 0
        assert stage.metric("warmroute_tokenized_requests_total", way="local") == 2


async def test_what_no_engine_takes_is_not_tokenized() -> None:
    """A prompt far beyond the model's length is forwarded at once, and refused there."""
    async with Engines(1, max_model_len=1000) as engines, on_stage(*engines) as stage:
        reply = await stage.ask(orjson.dumps(chat("x" * 20_000)))
        no_type = reply.error["message"]
        reply = await stage.ask(chat("x" * 20_000))

        assert reply.status == 400
        assert "maximum context length" in reply.error["message"]
        assert "Unsupported Media Type" in no_type
        assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 2


@pytest.mark.usefixtures("no_grace")
async def test_prompts_before_the_tokenizer_is_loaded_do_not_wait() -> None:
    """They are routed without tokens; /readyz says what is loading."""
    async with Engines(1) as engines, on_stage(*engines, ready=False) as stage:
        stage.router.prompters.start_loading("tiny")  # and never finishes
        await stage.until(lambda: stage.router.fleet.members.replicas)
        reply = await stage.ask(chat(words(1)))
        ready = await stage.ask(None, "/readyz", method="GET")

        assert reply.status == 200
        assert "x-warmroute-cached" not in reply.headers
        assert (ready.status, ready.body) == (503, b"loading tokenizers: tiny\n")


async def test_a_failover_keeps_the_tokens() -> None:
    """The prompt is tokenized once, however many replicas are tried."""
    async with Engines(3) as engines, on_stage(*engines) as stage:
        for engine in engines:
            arm(engine, "status", status=503, count=1)
        reply = await stage.ask(chat(words(1)))

        assert reply.status == 503
        assert stage.metric("warmroute_tokenized_requests_total") == 1
