// What users of the SDKs for Node see of the gateway: one line of JSON for each case.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// They are installed beside the build, not beside this file.
const require = createRequire(`${process.env.MODULES}/`);
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const { default: Anthropic } = await import(pathToFileURL(require.resolve("@anthropic-ai/sdk")));

const gateways = process.env.GATEWAYS.split(",");
const client = (apiKey, gateway = gateways[0], maxRetries = 0) =>
  new OpenAI({ apiKey, baseURL: `${gateway}/v1`, maxRetries });
const chat = (client, answer, more = {}) =>
  client.chat.completions.create(
    { model: "small", messages: [{ role: "user", content: "a" }], ...more },
    { headers: { "x-answer": answer } },
  );

async function textOf(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
  return text;
}

const openai = {
  answer: async () => {
    const answer = await chat(client("js-answer"), "openai-document");
    return `${answer.choices[0].message.content} ${answer.usage.total_tokens}`;
  },
  stream: async () => textOf(await chat(client("js-stream"), "openai", { stream: true })),
  stream_with_usage: async () => {
    let last;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await chat(client("js-usage"), "openai", options)) last = chunk;
    return `${last.choices.length} choices, ${last.usage.total_tokens}`;
  },
  tools: async () => {
    let text = "";
    for await (const chunk of await chat(client("js-tools"), "openai-tools", { stream: true }))
      for (const call of chunk.choices[0].delta.tool_calls ?? [])
        text += (call.function.name ?? "") + (call.function.arguments ?? "");
    return text;
  },
  responses: async () => {
    let text = "";
    const stream = await client("js-responses").responses.create(
      { model: "small", input: "a", stream: true },
      { headers: { "x-answer": "responses" } },
    );
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") text += event.delta;
      if (event.type === "response.completed") text += ` ${event.response.usage.total_tokens}`;
    }
    return text;
  },
  full: async () => {
    const open = [];
    for (let n = 0; n < 5; n++) {
      const stream = await chat(client("js-full", gateways[n % 2]), "openai-open", { stream: true });
      await stream[Symbol.asyncIterator]().next();
      open.push(stream);
    }
    try {
      await chat(client("js-full", gateways[2]), "openai-document");
      return "admitted";
    } finally {
      for (const stream of open) stream.controller.abort();
    }
  },
  cancelled: async () => {
    for (let turn = 0; turn < 2; turn++)
      for (let n = 0; n < 5; n++) {
        const stream = await chat(client("js-cancelled", gateways[turn], 3), "openai-open", { stream: true });
        for await (const _ of stream) break;
      }
    return "10 streams";
  },
  retried: async () => {
    for (let n = 0; n < 20; n++) await chat(client("js-retried", gateways[n % 3]), "openai-document");
    const began = performance.now();
    const answer = await chat(client("js-retried", gateways[0], 1), "openai-document");
    const took = performance.now() - began;
    return took < 4_000 ? `${answer.usage.total_tokens}, in time` : `after ${took} ms`;
  },
  no_key: async () => chat(new OpenAI({ apiKey: "x", baseURL: `${gateways[0]}/v1`, maxRetries: 0, defaultHeaders: { Authorization: null } }), "openai-document"),
  unknown: async () => client("js-unknown").images.generate({ prompt: "a cat", model: "small" }),
  silent: async () =>
    textOf(await chat(client("js-silent", process.env.IMPATIENT), "openai-open", { stream: true })),
};

const anthropicClient = (apiKey, gateway = gateways[0], maxRetries = 0) =>
  new Anthropic({ apiKey, authToken: null, baseURL: gateway, maxRetries });
const message = (client, answer, more = {}) =>
  client.messages.create(
    { model: "small", max_tokens: 100, messages: [{ role: "user", content: "a" }], ...more },
    { headers: { "x-answer": answer } },
  );

async function deltasOf(stream) {
  let text = "";
  for await (const event of stream)
    if (event.type === "content_block_delta") text += event.delta.text ?? event.delta.partial_json;
  return text;
}

const anthropic = {
  answer: async () => {
    const { usage } = await message(anthropicClient("ajs-answer"), "anthropic-document");
    return `${usage.input_tokens} ${usage.output_tokens}`;
  },
  stream: async () => deltasOf(await message(anthropicClient("ajs-stream"), "anthropic", { stream: true })),
  tools: async () => deltasOf(await message(anthropicClient("ajs-tools"), "anthropic-tools", { stream: true })),
  full: async () => {
    const open = [];
    for (let n = 0; n < 5; n++) {
      const stream = await message(anthropicClient("ajs-full", gateways[n % 2]), "anthropic-open", { stream: true });
      await stream[Symbol.asyncIterator]().next();
      open.push(stream);
    }
    try {
      await message(anthropicClient("ajs-full", gateways[2]), "anthropic-document");
      return "admitted";
    } finally {
      for (const stream of open) stream.controller.abort();
    }
  },
  retried: async () => {
    for (let n = 0; n < 20; n++) await message(anthropicClient("ajs-retried", gateways[n % 3]), "anthropic-document");
    const began = performance.now();
    const { usage } = await message(anthropicClient("ajs-retried", gateways[0], 1), "anthropic-document");
    const took = performance.now() - began;
    return took < 4_000 ? `${usage.output_tokens}, in time` : `after ${took} ms`;
  },
  no_key: async () => {
    const defaultHeaders = { Authorization: "none" };
    const client = new Anthropic({ apiKey: null, authToken: "x", baseURL: gateways[0], maxRetries: 0, defaultHeaders });
    return message(client, "anthropic-document");
  },
  unknown: async () => anthropicClient("ajs-unknown").messages.batches.list(),
  silent: async () =>
    deltasOf(await message(anthropicClient("ajs-silent", process.env.IMPATIENT), "anthropic-open", { stream: true })),
};

const sdks = { "openai (npm)": openai, "anthropic (npm)": anthropic };
const selected = (process.env.CASES ?? "").split(" ").filter(Boolean);
for (const [sdk, cases] of Object.entries(sdks))
  for (const [name, see] of Object.entries(cases)) {
    if (selected.length > 0 && !selected.includes(name)) continue;
    let seen;
    try {
      seen = await see();
    } catch (error) {
      seen = `${error.constructor.name}: ${error.message}` + (error.code ? ` (${error.code})` : "");
    }
    console.log(JSON.stringify({ sdk, case: name, seen }));
  }
