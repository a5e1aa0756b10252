"""What scripts import whatever their framework is: errors, process sets, the base of elastic states, small functions."""
