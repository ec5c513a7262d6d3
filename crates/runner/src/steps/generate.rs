//! `generate`: the step that makes jobs, and what it wrote.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use kici_engine::lock::{MAX_GENERATED_BYTES, MAX_GENERATED_JOBS};
use kici_engine::state::{FailureReason, StepStatus};
use serde_json::Value as Json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Run;
use super::command::Went;
use super::exec::{Ended, told};
use super::step::Attempt;
use crate::ports::{Generated, Reporter};
use crate::spool::StepLog;
use crate::stop::Stop;

impl Run<'_> {
    /// Makes the file that the step writes its jobs to.
    pub(super) fn jobs_file(&self, attempt: &Attempt<'_>) -> io::Result<PathBuf> {
        let path = attempt.dir.join("jobs");
        std::fs::create_dir_all(&attempt.dir)?;
        std::fs::File::create(&path)?;
        self.job.confine.open_way(&attempt.dir)?;
        self.job.confine.give(&path)?;
        Ok(path)
    }

    /// Reports what a step that ended well wrote, and waits until it is kept, within the limit of the step.
    pub(super) async fn report_jobs(
        &self,
        attempt: &Attempt<'_>,
        went: Went,
        path: &Path,
        log: &mut StepLog,
        reporter: &dyn Reporter,
        stop: &mut watch::Receiver<Stop>,
    ) -> io::Result<Went> {
        if went.status != StepStatus::Success {
            return Ok(went);
        }
        // What it gave out stays with the step that fails.
        let refused = |went: Went, why: String| Went {
            status: StepStatus::Failed,
            reason: FailureReason::DynamicEval,
            message: why,
            exit_code: None,
            ..went
        };
        let document = match read(path).and_then(|document| check(&document).map(|()| document)) {
            Ok(document) => document,
            Err(why) => return Ok(refused(went, why)),
        };
        let deadline = self.job.deadline.filter(|_| !attempt.after_stop);
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let generated = tokio::select! {
            generated = reporter.generated(document) => generated,
            () = late => return Ok(Went::interrupted(Ended::DeadlineReached)),
            stop = told(stop, attempt.after_stop) => return Ok(Went::interrupted(Ended::Stopped(stop))),
            () = tokio::time::sleep_until(attempt.until.max(Instant::now())) => {
                let message = format!("its jobs were not kept within {} s", attempt.limit.as_secs_f64());
                return Ok(Went::failed(FailureReason::StepTimeout, message));
            }
        };
        match generated {
            Generated::Kept(jobs) => {
                let text = match jobs {
                    0 => "it makes no jobs".to_owned(),
                    1 => "it makes 1 job".to_owned(),
                    jobs => format!("it makes {jobs} jobs"),
                };
                self.say(log, &[text]).await?;
                Ok(went)
            }
            Generated::Refused(why) => Ok(refused(went, self.job.masker.mask_text(&why))),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let refuse = |why: &str| format!("$KICI_JOBS cannot be read: {why}");
    let file = match kici_sys::host::open_plain(path) {
        Ok(Some(file)) => file,
        Ok(None) => return Err(refuse("it is not a plain file any more")),
        Err(error) => return Err(refuse(&error.to_string())),
    };
    let mut bytes = Vec::new();
    let most = MAX_GENERATED_BYTES as u64;
    file.take(most + 1).read_to_end(&mut bytes).map_err(|error| refuse(&error.to_string()))?;
    match bytes.len() as u64 {
        0 => Err("it wrote nothing to $KICI_JOBS; write {\"jobs\": []} for no jobs".to_owned()),
        length if length > most => Err(refuse("it is larger than 4 MiB")),
        _ => Ok(bytes),
    }
}

/// What can be told without the workflow; the orchestrator judges the rest.
fn check(document: &[u8]) -> Result<(), String> {
    let json: Json = serde_json::from_slice(document)
        .map_err(|error| format!("what it wrote to $KICI_JOBS is not JSON: {error}; write {{\"jobs\": […]}}"))?;
    let Some(jobs) = json.get("jobs").and_then(Json::as_array) else {
        return Err("what it wrote to $KICI_JOBS has no `jobs`; write {\"jobs\": […]}".to_owned());
    };
    if jobs.len() > MAX_GENERATED_JOBS {
        return Err(format!("it makes {} jobs; at most {MAX_GENERATED_JOBS} are allowed", jobs.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_document_of_jobs_is_refused_here() {
        for (document, want) in [
            ("{", "not JSON"),
            ("[]", "has no `jobs`"),
            (r#"{"jobs": {}}"#, "has no `jobs`"),
            (r#"{"jobs": []}"#, ""),
            (r#"{"jobs": [{"name": "a"}]}"#, ""),
        ] {
            let found = check(document.as_bytes()).err().unwrap_or_default();
            assert!(found.contains(want) && found.is_empty() == want.is_empty(), "{document}: {found}");
        }
        let many: Vec<&str> = vec!["{}"; MAX_GENERATED_JOBS + 1];
        let many = format!(r#"{{"jobs": [{}]}}"#, many.join(","));
        assert_eq!(check(many.as_bytes()), Err("it makes 257 jobs; at most 256 are allowed".to_owned()));
    }

    #[test]
    fn a_file_that_is_empty_or_too_large_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("jobs");
        std::fs::write(&path, "").expect("written");
        assert!(read(&path).is_err_and(|why| why.contains("wrote nothing")));
        std::fs::write(&path, vec![b' '; MAX_GENERATED_BYTES + 1]).expect("written");
        assert!(read(&path).is_err_and(|why| why.contains("larger than 4 MiB")));
        std::fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink("/etc/passwd", &path).expect("linked");
        assert!(read(&path).is_err_and(|why| why.contains("plain file")));
    }
}
