use super::*;

fn sample() -> Diagnostic {
    Diagnostic {
        code: "K0102".to_owned(),
        severity: Severity::Error,
        file: ".kici/workflows/ci.yaml".to_owned(),
        line: 9,
        col: 5,
        end_line: 9,
        end_col: 12,
        path: "jobs.build.runs-on".to_owned(),
        message: "unknown key `runs-on` in job `build`".to_owned(),
        expected: ["a", "b", "c", "d", "e", "f", "g"].map(str::to_owned).to_vec(),
        suggestion: Some("runs_on".to_owned()),
        help: None,
        fix: None,
    }
}

#[test]
fn long_form_shows_the_source() {
    let source = format!("{}    runs-on: linux\n", "\n".repeat(8));
    let expected = "\
error[K0102]: unknown key `runs-on` in job `build`
 --> .kici/workflows/ci.yaml:9:5
  |
9 |     runs-on: linux
  |     ^^^^^^^ expected one of: a, b, c, d, e, … (7 keys)
  |
  = help: did you mean `runs_on`? (KiCI keys use underscores)";
    assert_eq!(render_long(&sample(), &source, false), expected);
    assert!(render_long(&sample(), &source, true).contains("\u{1b}["));
}

#[test]
fn short_form_is_one_line() {
    assert_eq!(
        render_short(&sample()),
        ".kici/workflows/ci.yaml:9:5: error[K0102]: unknown key 'runs-on' in job 'build'; did you mean 'runs_on'?"
    );
}

#[test]
fn positions_outside_the_source_do_not_panic() {
    for (line, col, end_line, end_col) in [(0, 0, 0, 0), (99, 9, 99, 12), (1, 50, 1, 3), (1, 2, 7, 1)] {
        let diagnostic = Diagnostic { line, col, end_line, end_col, ..sample() };
        for source in ["", "äöü", "a: b\n", "\u{7}\t\r\n"] {
            render_long(&diagnostic, source, false);
        }
    }
}
