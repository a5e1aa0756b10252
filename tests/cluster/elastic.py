"""A rank of an elastic job, which goes on until a file says that it is over."""

RANK = """
import json, os, sys, time
from pathlib import Path
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod._bindings.objects import allgather_object, broadcast_object

folder = Path.cwd()
basics.init()
state = ObjectState(broadcast_object, basics.rank, step=0, over=False)
sizes = []

def train(state):
    sizes.append(basics.size())
    print(f"trains with {basics.size()}", flush=True)
    while not state.over:
        state.over = allgather_object((folder / "end").exists())[0]
        state.step += 1
        time.sleep(0.02)
        state.commit()

run_fn(train, Reset(basics.shutdown, basics.init))(state)
(folder / f"result.{os.environ['HOROVOD_ELASTIC_PROCESS']}").write_text(json.dumps([state.step, sizes]))
"""
