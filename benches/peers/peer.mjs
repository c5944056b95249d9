// The peers of npm. `node peer.mjs semaphore|rate <name> <limit> <lease ms> <processes> <url>`; the lines are those of
// `rust/src/protocol.rs`. NODE_PEERS names the folder in which the packages are installed.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const require = createRequire(`${process.env.NODE_PEERS}/`);
const Redis = require("ioredis");
const [kind, name, limitText, leaseText, , url] = process.argv.slice(2);
const [limit, lease] = [Number(limitText), Number(leaseText)];
const PATIENCE = 600_000;

const now = () => process.hrtime.bigint();
const say = (line) => process.stdout.write(`${line}\n`);
const fail = (id, called, error) => say(`e ${id} ${called} ${now()} ${String(error).replaceAll("\n", " ")}`);

// An error of a connection is an event, and ends the process if nobody listens.
function connect() {
  const redis = new Redis(url);
  redis.on("error", () => {});
  return redis;
}

// Each has `acquire(key, onLost)`, whose result has `release()`.
const semaphores = {
  "redis-semaphore"() {
    const { Semaphore } = require("redis-semaphore");
    const redis = connect();
    return async (key, onLockLost) => {
      const options = { lockTimeout: lease, acquireTimeout: PATIENCE, onLockLost };
      const semaphore = new Semaphore(redis, `slots:${key}`, limit, options);
      await semaphore.acquire();
      return () => semaphore.release();
    };
  },
  bottleneck() {
    const Bottleneck = require("bottleneck");
    const connection = new Bottleneck.IORedisConnection({ client: connect(), Redis });
    connection.on("error", () => {});
    const group = new Bottleneck.Group({ id: "slots", maxConcurrent: limit, connection });
    group.on("error", () => {});
    // A job runs until it is released. It expires as a lease would: the job fails then.
    return (key, onLost) =>
      new Promise((granted, refused) => {
        let free;
        const job = () => new Promise((resolve) => granted((free = resolve, release)));
        const done = group.key(String(key)).schedule({ expiration: lease }, job);
        let isReleased = false;
        const release = () => {
          isReleased = true;
          free();
          return done;
        };
        done.catch((error) => (free && !isReleased ? onLost() : refused(error)));
      });
  },
};

const rates = {
  "rate-limiter-flexible"() {
    const { RateLimiterRedis } = require("rate-limiter-flexible");
    const limiter = new RateLimiterRedis({ storeClient: connect(), points: limit, duration: 1 });
    return () => limiter.consume("all").then(
      () => true,
      (refusal) => {
        if (refusal instanceof Error) throw refusal;
        return false;
      },
    );
  },
};

const slots = kind === "semaphore" ? semaphores[name]() : undefined;
const rate = kind === "rate" ? rates[name]() : undefined;
const held = new Map();

async function hold(id, key) {
  const called = now();
  let release;
  try {
    release = await slots(key, () => say(`x ${id} ${now()}`));
  } catch (error) {
    return fail(id, called, error);
  }
  held.set(id, release);
  say(`g ${id} ${called} ${now()}`);
}

async function free(id) {
  const called = now();
  const release = held.get(id);
  held.delete(id);
  try {
    await release();
    say(`d ${id} ${called} ${now()}`);
  } catch (error) {
    fail(id, called, error);
  }
}

async function ask(id) {
  const called = now();
  try {
    say(`${(await rate()) ? "y" : "n"} ${id} ${called} ${now()}`);
  } catch (error) {
    fail(id, called, error);
  }
}

async function pairs(tasks, ms, keys) {
  const end = now() + BigInt(ms) * 1_000_000n;
  const times = [];
  let failures = 0;
  const one = async () => {
    while (now() < end) {
      const called = now();
      try {
        const release = await slots(Math.floor(Math.random() * keys), () => {});
        await release();
        times.push(Number(now() - called));
      } catch {
        failures++;
        await new Promise((resolve) => setTimeout(resolve, 10));
      }
    }
  };
  await Promise.all(Array.from({ length: tasks }, one));
  times.sort((a, b) => a - b);
  const at = (part) => times[Math.floor(times.length * part)] ?? 0;
  say(`p ${times.length} ${failures} ${at(0.5)} ${at(0.99)}`);
}

const handle = {
  a: hold,
  r: free,
  t: ask,
  l: (tasks, ms, keys) => pairs(Number(tasks), Number(ms), Number(keys)),
};
const lines = createInterface({ input: process.stdin });
lines.on("line", (line) => {
  const [word, ...rest] = line.split(" ");
  handle[word](...rest);
});
lines.on("close", () => process.exit());
say("ready");
