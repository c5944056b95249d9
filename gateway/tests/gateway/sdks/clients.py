"""What users of the Python SDKs see of the gateway: one line of JSON for each case.

The answer of the upstream that stands behind the gateway is chosen by the header `x-answer`.
"""

import asyncio
import json
import os
import time

import anthropic
import openai

GATEWAYS = os.environ["GATEWAYS"].split(",")
# A gateway whose upstream may be silent for a moment only.
IMPATIENT = os.environ["IMPATIENT"]


def openai_client(key, gateway=0, **more):
    base = f"{GATEWAYS[gateway]}/v1" if isinstance(gateway, int) else f"{gateway}/v1"
    return openai.OpenAI(api_key=key, base_url=base, **{"max_retries": 0, **more})


def anthropic_client(key, gateway=0, **more):
    base = GATEWAYS[gateway] if isinstance(gateway, int) else gateway
    return anthropic.Anthropic(api_key=key, base_url=base, **{"max_retries": 0, **more})


def chat(client, answer, text="a", **more):
    return client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": text}], extra_headers={"x-answer": answer}, **more
    )


def message(client, answer, text="a", **more):
    return client.messages.create(
        model="small", max_tokens=100, messages=[{"role": "user", "content": text}],
        extra_headers={"x-answer": answer}, **more,
    )


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def text_of_message(stream):
    return "".join(event.delta.text for event in stream if event.type == "content_block_delta")


class OpenAi:
    """With a key of its own for each case, so that none is in the way of another."""

    sdk = "openai (Python)"

    def answer(self):
        answer = chat(openai_client("py-answer"), "openai-document")
        return f"{answer.choices[0].message.content} {answer.usage.total_tokens}"

    def stream(self):
        return text_of(chat(openai_client("py-stream"), "openai", stream=True))

    def stream_with_usage(self):
        chunks = list(chat(openai_client("py-usage"), "openai", stream=True, stream_options={"include_usage": True}))
        return f"{len(chunks[-1].choices)} choices, {chunks[-1].usage.total_tokens}"

    def tools(self):
        calls = [
            call.function
            for chunk in chat(openai_client("py-tools"), "openai-tools", stream=True)
            for call in chunk.choices[0].delta.tool_calls or []
        ]
        return "".join(call.name or "" for call in calls) + "".join(call.arguments or "" for call in calls)

    def responses(self):
        text, tokens = "", None
        stream = openai_client("py-responses").responses.create(
            model="small", input="a", stream=True, extra_headers={"x-answer": "responses"}
        )
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.completed":
                tokens = event.response.usage.total_tokens
        return f"{text} {tokens}"

    def embeddings(self):
        answer = openai_client("py-embeddings").embeddings.create(
            model="small", input=["a"] * 40, extra_headers={"x-answer": "embeddings"}
        )
        return f"{answer.usage.total_tokens}"

    def full(self):
        open_streams = [chat(openai_client("py-full", n % 2), "openai-open", stream=True) for n in range(5)]
        for stream in open_streams:
            next(stream)
        try:
            chat(openai_client("py-full", 2), "openai-document")
        finally:
            for stream in open_streams:
                stream.close()

    def cancelled(self):
        """Five streams after five others that were left in the middle, on all gateways."""
        for turn in range(2):
            client = openai_client("py-cancelled", turn, max_retries=3)
            open_streams = [chat(client, "openai-open", stream=True) for _ in range(5)]
            for stream in open_streams:
                next(stream)
                stream.close()
        return "10 streams"

    def retried(self):
        """The burst is used up. A single retry succeeds only at the time that the gateway names, not after the SDK's own."""
        for number in range(20):
            chat(openai_client("py-retried", number % 3), "openai-document")
        began = time.monotonic()
        answer = chat(openai_client("py-retried", max_retries=1), "openai-document")
        took = time.monotonic() - began
        return f"{answer.usage.total_tokens}, in time" if took < 4 else f"after {took:.1f} s"

    def budget(self):
        client = openai_client("py-budget")
        chat(client, "openai-without-usage", "a " * 19_000, stream=True).close()
        for _ in range(2):
            chat(client, "openai-document-without-usage", "a " * 19_000)

    def too_long(self):
        chat(openai_client("py-long"), "openai-document", "a" * 5 * 1024 * 1024)

    def no_key(self):
        headers = {"x-answer": "openai-document", "Authorization": ""}
        openai_client("none").chat.completions.create(model="small", messages=[], extra_headers=headers)

    def unknown(self):
        openai_client("py-unknown").images.generate(prompt="a cat", model="small")

    def silent(self):
        text_of(chat(openai_client("py-silent", IMPATIENT), "openai-open", stream=True))

    def silent_response(self):
        client = openai_client("py-silent-2", IMPATIENT)
        headers = {"x-answer": "responses-open"}
        list(client.responses.create(model="small", input="a", stream=True, extra_headers=headers))


class Anthropic:
    sdk = "anthropic (Python)"

    def answer(self):
        usage = message(anthropic_client("an-answer"), "anthropic-document").usage
        return f"{usage.input_tokens} {usage.output_tokens}"

    def stream(self):
        return text_of_message(message(anthropic_client("an-stream"), "anthropic", stream=True))

    def tools(self):
        client = anthropic_client("an-tools")
        stream = message(client, "anthropic-tools", stream=True)
        return "".join(event.delta.partial_json for event in stream if event.type == "content_block_delta")

    def token(self):
        """The other way to authenticate."""
        client = anthropic.Anthropic(auth_token="an-token", base_url=GATEWAYS[0], max_retries=0)
        return text_of_message(message(client, "anthropic", stream=True))

    def full(self):
        open_streams = [message(anthropic_client("an-full", n % 2), "anthropic-open", stream=True) for n in range(5)]
        for stream in open_streams:
            next(iter(stream))
        try:
            message(anthropic_client("an-full", 2), "anthropic-document")
        finally:
            for stream in open_streams:
                stream.close()

    def retried(self):
        for number in range(20):
            message(anthropic_client("an-retried", number % 3), "anthropic-document")
        began = time.monotonic()
        usage = message(anthropic_client("an-retried", max_retries=1), "anthropic-document").usage
        took = time.monotonic() - began
        return f"{usage.output_tokens}, in time" if took < 4 else f"after {took:.1f} s"

    def budget(self):
        client = anthropic_client("an-budget")
        for _ in range(3):
            message(client, "anthropic-document-without-usage", "a " * 19_000)

    def too_long(self):
        message(anthropic_client("an-long"), "anthropic-document", "a" * 5 * 1024 * 1024)

    def no_key(self):
        headers = {"Authorization": "none"}
        client = anthropic.Anthropic(auth_token="x", base_url=GATEWAYS[0], max_retries=0, default_headers=headers)
        message(client, "anthropic-document")

    def unknown(self):
        anthropic_client("an-unknown").messages.batches.list()

    def silent(self):
        text_of_message(message(anthropic_client("an-silent", IMPATIENT), "anthropic-open", stream=True))


async def two_hundred():
    """200 streams of 40 keys on all gateways; one more is refused, and all others go on to their end."""
    clients = [
        openai.AsyncOpenAI(api_key=f"many-{n // 5}", base_url=f"{GATEWAYS[n % len(GATEWAYS)]}/v1", max_retries=0)
        for n in range(200)
    ]

    async def begin(client):
        stream = await chat(client, "openai-open", stream=True)
        await anext(stream)
        return stream

    streams = await asyncio.gather(*map(begin, clients))
    one_more = openai.AsyncOpenAI(api_key="one-more", base_url=f"{GATEWAYS[0]}/v1", max_retries=0)
    try:
        await chat(one_more, "openai-document")
        seen = "admitted"
    except openai.APIStatusError as error:
        seen = f"{type(error).__name__}: {error}"
    await asyncio.gather(*(stream.close() for stream in streams))

    async def read(client):
        return "".join([chunk.choices[0].delta.content or "" async for chunk in await chat(client, "openai", stream=True)])

    patient = [client.with_options(max_retries=5) for client in clients]
    texts = await asyncio.gather(*map(read, patient))
    return f"{len(streams)} open, then {seen}; {len(set(texts))} text of {len(texts)} streams: {texts[0]}"


def show(sdk, case, see):
    try:
        seen = see()
    except Exception as error:
        code = getattr(error, "code", None)
        seen = f"{type(error).__name__}: {error}" + (f" ({code})" if code else "")
    print(json.dumps({"sdk": sdk, "case": case, "seen": seen}), flush=True)


selected = os.environ.get("CASES", "").split()
for user in [OpenAi(), Anthropic()]:
    for case in [name for name in type(user).__dict__ if not name.startswith("_") and name != "sdk"]:
        if not selected or case in selected:
            show(user.sdk, case, getattr(user, case))
if not selected or "two_hundred" in selected:
    show(OpenAi.sdk, "two_hundred", lambda: asyncio.run(two_hundred()))
