#!/usr/bin/env bash
# From a text to an answer: compacts the text into a cartridge, serves it, and asks a question about it.
#
#   examples/cartridge.sh TEXT [QUESTION]
#
# MODEL (the demo model), SLOTS (256), OUT (runs/cartridge; an existing one is used again), PORT (8001), OPTIONS of
# `vllm serve`, such as a policy for what is written after the cartridge, and COMPACT_OPTIONS of `kvpop compact`, such as
# another method, in place of `--slots SLOTS`, can be set.
set -euo pipefail

text=${1:?usage: examples/cartridge.sh TEXT [QUESTION]}
question=${2:-What is this text about?}
here=$(cd "$(dirname "$0")/.." && pwd)
bin=${BIN:-$here/.venv/bin}
model=${MODEL:-$here/models/SmolLM2-135M-Instruct}
out=${OUT:-runs/cartridge}
port=${PORT:-8001}

[ -x "$bin/kvpop" ] && [ -e "$model/config.json" ] || make -C "$here" model
[ -e "$out/kvpop_cartridge.json" ] || "$bin/kvpop" compact "$model" --data "$text" --out "$out" \
    ${COMPACT_OPTIONS:---slots ${SLOTS:-256}}
"$bin/vllm" serve "$model" --kv-cartridge "text=$out" --kv-cache-memory-bytes "${KV_MEMORY:-536870912}" --port "$port" \
    ${OPTIONS:-} > "$out/serve.log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null; wait $server 2> /dev/null || true' EXIT
until curl -sf "localhost:$port/health" > /dev/null; do
    kill -0 $server 2> /dev/null || { tail -n 3 "$out/serve.log" >&2; exit 1; }
    sleep 1
done
"$bin/python" - "$port" "$question" << 'END'
import sys

import openai

port, question = sys.argv[1:]
client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")
answer = client.chat.completions.create(
    model="text", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=200
)
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens} prompt tokens, slots of the cartridge included", file=sys.stderr)
END
