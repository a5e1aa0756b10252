"""A model of elastic training: the launcher's policy and the ranks' policies, driven through random sequences of events.

Both sides decide purely: :class:`horovod.runner.elastic.elastic_policy.ElasticPolicy` for the launcher,
:class:`horovod.elastic.rank_policy.RankPolicy` for each rank. The model plays what is between them: messages that come in any
order, processes that start, stop and die, collectives, timers. ``tests/unit/elastic/test_model.py`` runs some sequences,
``tests/elastic_sequences.py`` many.
"""
