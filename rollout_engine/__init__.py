"""k attempts x m models x n tasks, of any agent in any sandbox, over Ray, into Arrow tables with rewards."""
