"""Speed and memory against named peers, each ratio measured in one run. `make bench` runs all, or the ones named."""
