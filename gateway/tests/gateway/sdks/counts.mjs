// What a tokenizer of OpenAI counts in the texts of this folder: their names and numbers, in lines.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";

const { encode } = createRequire(`${process.env.MODULES}/`)("gpt-tokenizer/encoding/o200k_base");
const folder = new URL("../texts/", import.meta.url);
for (const name of readdirSync(folder).sort())
  console.log(name, encode(readFileSync(new URL(name, folder), "utf8")).length);
