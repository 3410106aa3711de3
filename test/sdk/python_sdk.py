"""Run by examples/python/check.sh: what the SDK wmill sends comes back as it was, live and replayed."""

import asyncio
import json
import math
import os
import re
import sys
import uuid

import httpx
from runner import CAIRN, run_workflow
from wmill import TaskError, step

ran = []


def run(results, job_id):
    """Runs one step for each member of `results`, all at once; gives what the workflow saw."""

    def work(name):
        ran.append(name)
        if isinstance(results[name], Exception):
            raise results[name]
        return results[name]

    async def see(name):
        try:
            return await step(name, lambda: work(name))
        except TaskError as error:
            return [type(error).__name__, str(error), error.step_key, error.result]

    async def workflow():
        return dict(zip(results, await asyncio.gather(*(see(name) for name in results))))

    ran.clear()
    return run_workflow(job_id, workflow)


def text(job_id, key):
    response = httpx.get(f"{CAIRN}/jobs/{job_id}/steps", params={"key": key})
    return re.fullmatch(r'\{"steps":\[\{"key":.*?,"result":(.*)\}\]\}', response.text, re.S).group(1)


def timeline(job_id):
    return httpx.get(f"{CAIRN}/jobs/{job_id}/timeline").json()["entries"]


def nest(levels):
    return [nest(levels - 1)] if levels else []


def check_values_come_back():
    results = {
        "__proto__": {"__proto__": 1},
        "4,000 digits": int("1234567890" * 400),
        "negative": -(2**63) - 1,
        "float": [1.0, 1e22, -0.0, 0.1, 5e-324],
        "duplicate members": {1: "a", "1": "b", None: "c", "null": "d"},
        "half surrogates": ["\ud83e", "a\udd16", "\udd16\ud83e"],
        "NUL": {"a\0b": "\0"},
        "none": None,
        "text": 'ż🐢"\\\n',
        "deep": nest(500),
        "tuple": (1, 2),
        "other types": uuid.UUID(int=1),
        "big text": "żółw 🐢 " * 100_000,
        "fails": ValueError("a\0b \ud83e ż"),
        "fails with members": type("Refused", (Exception,), {})("no"),
    }
    job_id = str(uuid.uuid4())
    live = run(results, job_id)
    assert sorted(ran) == sorted(results), ran
    assert live["fails"][:3] == ["TaskError", "a\0b \ud83e ż", "fails"] and live["fails"][3]["error"]["name"] == "ValueError"
    for name, result in results.items():
        if isinstance(result, Exception):
            continue
        sent = json.dumps(result, default=str)
        assert text(job_id, name) == sent, (name, text(job_id, name)[:200], sent[:200])
        assert live[name] == json.loads(sent), name
    assert text(job_id, "duplicate members") == '{"1": "a", "1": "b", "null": "c", "null": "d"}'

    for entry in timeline(job_id):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?\+00:00", entry["started_at"]), entry
    assert any("." in entry["started_at"] for entry in timeline(job_id))

    assert run(results, job_id) == live
    assert ran == [], ran


def check_the_fast_path_off():
    results = {"a": 1.0, "b": ValueError("no"), "c": {1: 2}}
    job_id = str(uuid.uuid4())
    os.environ["WM_WAC_INLINE_FAST_PATH"] = "0"
    live = run(results, job_id)
    del os.environ["WM_WAC_INLINE_FAST_PATH"]
    assert sorted(ran) == ["a", "b", "c"], ran
    assert run(results, job_id) == live and live["a"] == 1.0 and live["c"] == {"1": 2}
    assert ran == [], ran


def check_nan_is_refused():
    for number in (math.nan, math.inf, [-math.inf]):
        job_id = str(uuid.uuid4())
        assert run({"before": 1}, job_id) == {"before": 1}
        try:
            run({"before": 1, "number": number}, job_id)
        except ValueError as error:
            assert "Out of range float values are not JSON compliant" in str(error), error
        else:
            raise AssertionError("NaN was recorded")
        assert ran == ["number"], ran
        assert [entry["key"] for entry in timeline(job_id)] == ["before"]


def check_more_digits_than_python_converts():
    # Python 3.11 and the security releases before it refuse to print or read longer integers unless told otherwise.
    if not hasattr(sys, "set_int_max_str_digits"):
        return
    job_id = str(uuid.uuid4())
    big = {"big": 10**20_000 + 7}
    try:
        run(big, job_id)
    except ValueError as error:
        assert "Exceeds the limit" in str(error), error
    else:
        raise AssertionError("Python has no limit")
    assert timeline(job_id) == []
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    assert run(big, job_id) == big == run(big, job_id)
    assert text(job_id, "big") == str(big["big"])
    sys.set_int_max_str_digits(limit)


check_values_come_back()
check_the_fast_path_off()
check_nan_is_refused()
check_more_digits_than_python_converts()
print("All well")
