//! The reference of the command line, made from the commands themselves.

use std::fmt::Write;
use std::path::Path;

use clap::{Arg, Command, CommandFactory};

use crate::args::Cli;

const HEAD: &str = "<!-- Made from the commands by `UPDATE=1 cargo test -p kici-admin docs`; do not edit. -->\n\n\
    # kici-admin\n\n";

fn reference() -> String {
    let mut command = Cli::command();
    command.build();
    let mut text = HEAD.to_owned();
    let about = command.get_long_about().map(ToString::to_string).unwrap_or_default();
    writeln!(text, "{about}\n\n## Options of every command\n").unwrap();
    options(&mut text, command.get_arguments().filter(|arg| arg.is_global_set()));
    for child in command.get_subcommands().filter(|child| child.get_name() != "help") {
        section(&mut text, child, "kici-admin", 2);
    }
    text
}

fn section(text: &mut String, command: &Command, parent: &str, level: usize) {
    let name = format!("{parent} {}", command.get_name());
    let children: Vec<&Command> = command.get_subcommands().filter(|child| child.get_name() != "help").collect();
    writeln!(text, "\n{} {name}\n", "#".repeat(level)).unwrap();
    writeln!(text, "{}.", command.get_about().map(ToString::to_string).unwrap_or_default().trim_end_matches('.'))
        .unwrap();
    if children.is_empty() {
        let arguments: String = command.get_positionals().fold(String::new(), |all, arg| {
            let value = arg.get_id().as_str().to_uppercase();
            all + &if arg.is_required_set() { format!(" {value}") } else { format!(" [{value}]") }
        });
        writeln!(text, "\n```\n{name}{arguments} [OPTIONS]\n```\n").unwrap();
        options(text, command.get_arguments().filter(|arg| !arg.is_global_set()));
    }
    for child in children {
        section(text, child, &name, (level + 1).min(4));
    }
}

fn options<'a>(text: &mut String, arguments: impl Iterator<Item = &'a Arg>) {
    let shown: Vec<&Arg> = arguments.filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version")).collect();
    if shown.is_empty() {
        return;
    }
    writeln!(text, "| option | meaning | variable |\n|---|---|---|").unwrap();
    for arg in shown {
        let value = if arg.get_action().takes_values() && !arg.is_positional() {
            format!(" {}", arg.get_value_names().and_then(|names| names.first()).map_or("VALUE", |name| name.as_str()))
        } else {
            String::new()
        };
        let short = arg.get_short().map(|short| format!("`-{short}`, ")).unwrap_or_default();
        let name = match arg.get_long() {
            Some(long) => format!("{short}`--{long}{value}`"),
            None => format!("`{}`", arg.get_id().as_str().to_uppercase()),
        };
        let mut help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        if arg.get_action().takes_values() && !defaults.is_empty() {
            write!(help, " [default: {}]", defaults.join(", ")).unwrap();
        }
        let words: Vec<_> = arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
        if arg.get_action().takes_values() && !words.is_empty() {
            write!(help, " [{}]", words.join(", ")).unwrap();
        }
        let variable = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
        writeln!(text, "| {name} | {} | {variable} |", help.replace('|', "\\|")).unwrap();
    }
}

#[test]
fn the_reference_in_docs_is_fresh() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    let expected = reference();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "docs/cli.md is stale; run `UPDATE=1 cargo test -p kici-admin docs`");
}
