"""Print the tables of docs/flags.md: every flag, from the one table that the command line reads."""

from shardwise.answers._reference import flags_page

if __name__ == "__main__":
    print(flags_page())
