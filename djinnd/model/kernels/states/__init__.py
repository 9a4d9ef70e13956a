"""Steps of single tokens of many sessions: kernels read their states in the pages and write the new ones there"""
