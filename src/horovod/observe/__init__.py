"""What a running job says about itself: log lines, stalls, where each rank is."""
