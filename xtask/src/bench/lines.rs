//! Log lines that are told apart, and their way back.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use kici_api::dto::logs::{LogQuery, LogStream, MAX_LINES};
use kici_engine::ids::RunId;
use kici_engine::time::Ts;
use kici_protocol::common::JobRef;

use crate::dev::server::Server;

/// When all of them were read, in microseconds.
const AT: i64 = 1_764_450_000_000_000;

/// The text of a line. Numbers far apart differ in many places, so that pieces of two lines make no third.
fn text(number: u64) -> String {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{number:08} {mixed:016x} the quick brown fox jumps over the lazy dog and runs")
}

/// Lines in the stored form.
pub(super) fn chunk(first: usize, count: usize) -> Bytes {
    let mut data = String::new();
    for number in first..first + count {
        // Writing to a text cannot fail.
        let _ = writeln!(data, "{AT} o {}", text(number as u64));
    }
    data.into()
}

/// Reads the whole log of the one step of a job and compares every line.
pub(super) async fn read_back(server: &Server, job: &JobRef, count: u64) -> Result<()> {
    let run: RunId = job.run_id.parse().context("the id of the run")?;
    let steps = server.steps(run).await?;
    let step = steps.first().context("the job has no step")?;
    ensure!(step.log.lines == count, "{} lines of {count} are counted", step.log.lines);
    let mut next = 0;
    loop {
        let query = LogQuery { from_seq: next, limit: Some(MAX_LINES), ..LogQuery::default() };
        let range = server.client().step_logs(run, &job.job_id, &step.key, &query).await?;
        for line in &range.lines {
            let as_sent = line.seq == next && line.at == Ts::from_micros(AT) && line.stream == LogStream::Out;
            ensure!(as_sent && line.text == text(next), "line {next} came back as {line:?}");
            next += 1;
        }
        if range.complete {
            ensure!(next == count, "{next} lines of {count} came back");
            return Ok(());
        }
        ensure!(range.next_seq == next && !range.lines.is_empty(), "the log ends at line {next} of {count}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_go_on_where_the_last_one_ended() {
        let whole = chunk(0, 20);
        assert_eq!(whole, [chunk(0, 13), chunk(13, 7)].concat());
        let mut lines: Vec<&[u8]> = whole.trim_ascii_end().split(|byte| *byte == b'\n').collect();
        let size = lines[0].len();
        assert!(lines.iter().all(|line| line.len() == size && line.starts_with(b"1764450000000000 o 000000")));
        lines.dedup();
        assert_eq!(lines.len(), 20);
    }
}
