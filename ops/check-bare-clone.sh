#!/usr/bin/env bash
# Proves the README's first command: clones this checkout into a folder that only its owner may enter, without
# node_modules, starts the service with `npm start`, records and reads a step, stops it, and reads the step again.
set -euo pipefail
source_dir=$(cd "$(dirname "$0")/.." && pwd)
work_dir=$(mktemp -d)
chmod 0700 "$work_dir"
service=
port=18080

stop_service() {
  [ -n "$service" ] || return 0
  kill -TERM -- "-$service" 2>/dev/null || true
  wait "$service" 2>/dev/null || true
  service=
}

cleanup() {
  stop_service
  # As root the data may lie elsewhere, and .data/postgres is then a link to it.
  local data
  data=$(readlink -f "$work_dir/clone/.data/postgres" 2>/dev/null || true)
  rm -rf "$work_dir"
  case "$data" in */cairn/data-*/*) rm -rf "$(dirname "$data")" ;; esac
}
trap cleanup EXIT

start_service() {
  # A process group of its own, so that npm and what it started end together.
  setsid npm start >"$work_dir/output" 2>&1 &
  service=$!
  for _ in $(seq 600); do
    if curl -fsS "http://127.0.0.1:$port/readyz" >/dev/null 2>&1; then return 0; fi
    if ! kill -0 "$service" 2>/dev/null; then break; fi
    sleep 0.2
  done
  echo 'npm start did not come up:' >&2
  cat "$work_dir/output" >&2
  return 1
}

git clone --quiet "$source_dir" "$work_dir/clone"
cd "$work_dir/clone"
export PORT=$port
url=http://127.0.0.1:$port/jobs/01939a7e-5b5c-7f3e-9d41-3c7f8a1d2e4b

start_service
grep -q "listens on http://127.0.0.1:$port" "$work_dir/output"
grep -q 'curl -X POST' "$work_dir/output"
curl -fsS -X POST "$url/inline-checkpoint" -H 'content-type: application/json' -d '{"key":"greet","result":{"n":1.0}}'
stop_service

# Newer npm refuses install scripts unless asked: nothing may depend on them.
rm -rf node_modules
npm_config_ignore_scripts=true node ops/ensure-installed.mjs
start_service
[ "$(curl -fsS "$url/steps/greet")" = '{"n":1.0}' ]
stop_service
echo
echo 'The bare clone works'
