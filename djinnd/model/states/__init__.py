"""States of hybrid models, which some modules keep instead of KV, in the pages of a session"""
