"""``horovod.ray`` does not exist in this Horovod yet. Importing it says so."""

raise ImportError(
    "horovod.ray does not exist in this Horovod yet (RayExecutor and its settings); start the job with horovodrun or "
    "horovod.run on Ray's nodes, or give Ray's workers the rendezvous server of horovod.runner.http.http_server"
)
