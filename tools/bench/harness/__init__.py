"""The common parts of benches: command line, private daemons, measurements in turns, reports, rates of the bus."""
