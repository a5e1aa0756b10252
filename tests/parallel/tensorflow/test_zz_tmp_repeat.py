import sys
sys.path.insert(0, "/work/main/tests/parallel/tensorflow")
import pytest, time
import test_data_compute_service as m
from test_data_compute_service import serve
def read(config, mode):
    import tensorflow as tf, time
    import horovod.tensorflow as hvd
    from horovod.tensorflow.data import compute_service
    hvd.init()
    laps=[]; t=time.time()
    def lap(what):
        nonlocal t
        d=round(time.time()-t,1)
        if d>1.9: laps.append((what, d))
        t=time.time()
    try:
        rank, size, seen = hvd.rank(), hvd.size(), []
        for _ in range(2):
            if "s" in mode:
                data = tf.data.Dataset.range(20).send_to_data_service(config, rank, size, reuse_dataset=True)
                for _ in range(2):
                    [int(e) for e in data]; lap("shared"); hvd.allgather_object(0); lap("wait")
            if "r" in mode:
                data = tf.data.Dataset.range(1000).repeat().send_to_data_service(config, rank, size, reuse_dataset=True, round_robin=True)
                it = iter(data); [int(next(it)) for _ in range(9)]
                lap("read"); hvd.allgather_object(0); lap("wait")
            if "a" in mode:
                data = tf.data.Dataset.range(6).send_to_data_service(config, rank)
                [int(e) for e in data]; lap("alone"); hvd.allgather_object(0); lap("wait")
        if rank == 0:
            config.compute_client().shutdown()
        lap("shutdown")
        return laps
    finally:
        hvd.shutdown()
def work(config):
    import time
    from horovod.tensorflow.data import compute_service as c
    from contextlib import contextmanager
    laps=[]
    t0=time.time()
    @contextmanager
    def stopping(server):
        try: yield
        finally:
            t=time.time(); server.stop(); laps.append((type(server).__name__[:1], round(t-t0,1), round(time.time()-t,1)))
    c._stopping = stopping
    c.compute_worker_fn(config)
    return laps
@pytest.mark.parametrize("n", range(6))
@pytest.mark.parametrize("mode", ["sra", "sr", "ra", "sa"])
def test_again(ranks, serve, n, mode):
    config = serve(1, "compute")
    workers, training = ranks(m.POOL, m.QUIET, "tensorflow"), ranks(m.POOL, m.TRAINING, "tensorflow")
    working = workers.start(work, config)
    t=time.time()
    r=training.run(read, config, mode, timeout=120)
    t2=time.time()-t; t=time.time()
    e=working.results(120); print(mode, "end", round(t2,1), round(time.time()-t,1), r, e, file=sys.__stderr__, flush=True)
