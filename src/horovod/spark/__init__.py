"""``horovod.spark`` does not exist in this Horovod yet. Importing it says so."""

raise ImportError(
    "horovod.spark does not exist in this Horovod yet (horovod.spark.run, estimators and stores); "
    "start the job with horovodrun or horovod.run on Spark's hosts, and read the data from files"
)
