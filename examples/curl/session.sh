#!/bin/sh
# A tour of Cairn with curl. Run it, or paste it piece by piece into a shell.
CAIRN_URL=${CAIRN_URL:-http://127.0.0.1:8080}
JOB=$(uuidgen 2>/dev/null || cat /proc/sys/kernel/random/uuid)

# Record a finished step. The answer means: it is committed.
curl -sS "$CAIRN_URL/jobs/$JOB/inline-checkpoint" -H 'content-type: application/json' \
  -d '{"key": "charge card", "result": {"cents": 1850, "id": 12345678901234567890}, "started_at": "2026-12-01T01:45:06.357Z", "duration_ms": 812, "source_hash": "v1"}'
echo

# The answer was lost? Send it again: the same version, so nothing was changed.
curl -sS "$CAIRN_URL/jobs/$JOB/inline-checkpoint" -H 'content-type: application/json' \
  -d '{"key": "charge card", "result": {"cents": 1850, "id": 12345678901234567890}, "started_at": "2026-12-01T01:45:06.357Z", "duration_ms": 812, "source_hash": "v1"}'
echo

# Another step: the first result of a key stands. Here the second one comes too late, and is told what stands.
curl -sS "$CAIRN_URL/jobs/$JOB/steps" -H 'content-type: application/json' -d '{"key": "pick courier", "result": "blue"}'
echo
curl -sS "$CAIRN_URL/jobs/$JOB/steps" -H 'content-type: application/json' -d '{"key": "pick courier", "result": "red"}'
echo

# The checkpoint: what a run of the workflow reads before it starts. Digits come back as they were sent.
curl -sS "$CAIRN_URL/jobs/$JOB/checkpoint"
echo

# One step's result, alone.
curl -sS "$CAIRN_URL/jobs/$JOB/steps/charge%20card"
echo

# When everything ran, and how it ended.
curl -sS "$CAIRN_URL/jobs/$JOB/timeline"
echo

# The workflow's source has changed since: refused, nothing is touched.
curl -sS "$CAIRN_URL/jobs/$JOB/inline-checkpoint" -H 'content-type: application/json' \
  -d '{"key": "send receipt", "result": null, "source_hash": "v2"}'
echo
