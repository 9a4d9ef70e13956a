"""What every bench shares: reports, prompts, percentiles, a daemon with a pool of known size, rates of the bus."""
