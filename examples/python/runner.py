import asyncio
import json
import os
import sys
import time

import httpx
from wmill.client import WorkflowCtx, _StepSuspend, _workflow_ctx

CAIRN = os.environ.get("CAIRN_URL", "http://127.0.0.1:8080")
TOKEN = os.environ.get("CAIRN_TOKEN", "none")


def run_workflow(job_id, workflow):
    """Runs `workflow` as the job `job_id` (a UUID) to its end. What the job's checkpoint holds is not run again."""
    os.environ.update(BASE_INTERNAL_URL=CAIRN, WM_TOKEN=TOKEN, WM_WORKSPACE="examples", WM_JOB_ID=job_id)
    while True:
        outcome, unrecorded = asyncio.run(run_round(workflow, call(f"/jobs/{job_id}/checkpoint")))
        # A step whose result the SDK could not record suspends. Record it here, then go again from the top.
        for step in unrecorded:
            call(f"/jobs/{job_id}/inline-checkpoint", step)
        if unrecorded:
            continue
        if isinstance(outcome, _StepSuspend):
            raise RuntimeError("This runner knows step() alone")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


async def run_round(workflow, checkpoint):
    ctx = WorkflowCtx(checkpoint)
    _workflow_ctx.set(ctx)
    run_step, steps, suspends = ctx._run_inline_step, [], []

    async def track(name, fn):
        if suspends:
            raise suspends[0]
        try:
            return await run_step(name, fn)
        except _StepSuspend as suspend:
            suspends.append(suspend)
            raise

    def start(name, fn):
        steps.append(asyncio.ensure_future(track(name, fn)))
        return steps[-1]

    ctx._run_inline_step = start
    [outcome] = await asyncio.gather(workflow(), return_exceptions=True)
    await asyncio.gather(*steps, return_exceptions=True)
    return outcome, [suspend.dispatch_info for suspend in suspends]


def call(path, body=None):
    """GET, or POST if there is a body; for two minutes if Cairn does not answer. Raises what Cairn refuses."""
    # NaN and Infinity are not JSON: refused here as Cairn refuses them.
    content = None if body is None else json.dumps(body, default=str, allow_nan=False)
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    for _ in range(120):
        try:
            response = httpx.request("POST" if body else "GET", CAIRN + path, content=content, headers=headers, timeout=10)
            answer = response.json()
            if response.is_success:
                return answer
            if not answer.get("retryable"):
                raise RuntimeError(f"{answer.get('code')}: {answer.get('detail')}")
        except (httpx.HTTPError, json.JSONDecodeError):
            pass
        print(f"Cairn at {CAIRN} does not answer yet (CAIRN_URL says where it is)", file=sys.stderr)
        time.sleep(1)
    raise RuntimeError(f"Cairn at {CAIRN} does not answer")
