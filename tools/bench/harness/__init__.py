"""What benches share: the command line, private daemons, measurements in turns, reports, rates of the bus."""
