# python order.py [job id] [--crash]
import asyncio
import os
import signal
import sys
import uuid

from runner import run_workflow
from wmill import TaskError, step


async def order():
    cart = await step("read cart", lambda: work("read cart", {"items": ["tea", "cup"], "cents": 1850}))
    stock, parcel = await asyncio.gather(
        step("reserve stock", lambda: work("reserve stock", {"reserved": len(cart["items"])})),
        step("book parcel", lambda: work("book parcel", {"tracking": str(uuid.uuid4())})),
    )
    payment = await step("charge card", lambda: work("charge card", {"charged": cart["cents"]}))
    if "--crash" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        bonus = await step("add bonus points", lambda: fail("add bonus points", "No such customer"))
    except TaskError as error:
        bonus = f"none ({error})"
    await step("send receipt", lambda: work("send receipt", None))
    return {**stock, **parcel, **payment, "bonus": bonus}


def work(name, result):
    print(f"* really runs: {name}", flush=True)
    return result


def fail(name, message):
    print(f"* really runs: {name}", flush=True)
    raise ValueError(message)


job_id = next((argument for argument in sys.argv[1:] if argument != "--crash"), str(uuid.uuid4()))
print(f"Job {job_id}", flush=True)
print("Result", run_workflow(job_id, order))
