"""Reports about a running job: log lines, stalls, progress, timelines, and what ranks write down."""
