//! What files become, and what is said to be lost: one for each system, with what containers, services, caches and artifacts
//! may look like. `INSTA_UPDATE=always` writes the expectations again.

use std::fmt::Write as _;

use kici_convert::{Conversion, Dialect, Options, Outcome, convert};

fn told(made: &Conversion) -> String {
    let mut out = made.text.clone().unwrap_or_default();
    writeln!(out, "---").expect("written");
    for loss in &made.losses {
        writeln!(out, "{}:{}: {}: {}", loss.line, loss.column, loss.key, loss.reason).expect("written");
    }
    out
}

fn made(path: &str, text: &str, dialect: Dialect) -> Conversion {
    let made = convert(path, text, None, &Options::default());
    assert_eq!((made.dialect, &made.outcome), (dialect, &Outcome::RunsWithLoss), "{:?}", made.outcome);
    made
}

#[test]
fn github() {
    insta::assert_snapshot!(told(&made(
        ".github/workflows/ci.yml",
        include_str!("golden/github.yml"),
        Dialect::Github
    )));
}

#[test]
fn gitlab() {
    insta::assert_snapshot!(told(&made(".gitlab-ci.yml", include_str!("golden/gitlab-ci.yml"), Dialect::Gitlab)));
}

#[test]
fn woodpecker() {
    insta::assert_snapshot!(told(&made(".woodpecker.yml", include_str!("golden/woodpecker.yml"), Dialect::Woodpecker)));
}

#[test]
fn drone() {
    insta::assert_snapshot!(told(&made(".drone.yml", include_str!("golden/drone.yml"), Dialect::Drone)));
}

#[test]
fn containers_are_left_out_where_nobody_wants_them() {
    let options = Options { containers: false, ..Options::default() };
    for (path, text) in [
        (".github/workflows/ci.yml", include_str!("golden/github.yml")),
        (".gitlab-ci.yml", include_str!("golden/gitlab-ci.yml")),
        (".woodpecker.yml", include_str!("golden/woodpecker.yml")),
        (".drone.yml", include_str!("golden/drone.yml")),
    ] {
        let made = convert(path, text, None, &options);
        let written = made.text.expect("it runs");
        assert!(!written.contains("container:") && !written.contains("services:"), "{written}");
        assert!(made.losses.iter().any(|loss| loss.reason.contains("containers are left out")), "{path}");
    }
}
