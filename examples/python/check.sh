#!/bin/sh
# Runs the Python example against a service and database of its own: killed in the middle, then again. No arguments.
# Needs node, python3 with venv, and the Python package index.
set -eu
cd "$(dirname "$0")/../.."

dir=$(mktemp -d)
service=
finish() {
  status=$?
  if [ -n "$service" ]; then
    kill "$service" 2>/dev/null || true
    wait "$service" || true
  fi
  [ "$status" -eq 0 ] || tail -n 40 "$dir"/*.log >&2 || true
  rm -rf "$dir"
  exit "$status"
}
trap finish EXIT
trap 'exit 1' INT TERM
# Where Postgres runs as another user, that user has to pass through.
chmod 711 "$dir"

fail() {
  echo "$1" >&2
  exit 1
}

echo 'Installing wmill'
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet --disable-pip-version-check -r examples/python/requirements.txt
python=$dir/venv/bin/python

echo 'Starting Cairn'
: >"$dir/service.log"
PORT=0 DATA_DIR=$dir/data node --import tsx src/main.ts >"$dir/service.log" 2>&1 &
service=$!
waited=0
until url=$(sed -n 's/^Cairn listens on //p' "$dir/service.log") && [ -n "$url" ]; do
  kill -0 "$service" 2>/dev/null || fail 'Cairn does not start'
  [ "$waited" -lt 120 ] || fail 'Cairn does not listen after 120 s'
  waited=$((waited + 1))
  sleep 1
done
export CAIRN_URL="$url" PYTHONDONTWRITEBYTECODE=1

job=$("$python" -c 'import uuid; print(uuid.uuid4())')
order() {
  "$python" examples/python/order.py "$job" "$@"
}

echo 'Running order.py, killed in the middle'
if order --crash >"$dir/first.log" 2>&1; then fail 'order.py --crash should have been killed'; fi
[ "$(grep -c '^\* really runs' "$dir/first.log")" -eq 4 ] || fail 'The first run should execute four steps'

echo 'Running it again'
order >"$dir/second.log" 2>&1 || fail 'The second run failed'
printf '* really runs: %s\n' 'add bonus points' 'send receipt' >"$dir/wanted.log"
grep '^\* really runs' "$dir/second.log" | cmp - "$dir/wanted.log" || fail 'The second run should execute the last two steps'
grep -q "^Result .*'charged': 1850, 'bonus': 'none (No such customer)'" "$dir/second.log" || fail 'The result is wrong'

echo 'And once more: everything is a replay'
order >"$dir/third.log" 2>&1 || fail 'The third run failed'
if grep '^\* really runs' "$dir/third.log"; then fail 'The third run should execute nothing'; fi
[ "$(grep '^Result' "$dir/second.log")" = "$(grep '^Result' "$dir/third.log")" ] || fail 'A replay gives another result'

echo 'What the SDK sends'
# The SDK prints the message of a failed step, and an encoding that refuses half surrogates would end the step there.
PYTHONIOENCODING=utf-8:backslashreplace PYTHONPATH=examples/python "$python" test/sdk/python_sdk.py >"$dir/sdk.log" 2>&1 || fail 'test/sdk/python_sdk.py failed'
echo 'All well'
