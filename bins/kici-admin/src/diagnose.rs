//! `diagnose`.

use kici_api::dto::system::{Check, CheckStatus};

use crate::exit::{FAILED, Failure, VERDICT};
use crate::output::{Column, status, text};
use crate::verbs::Context;

const fn word(status: CheckStatus) -> &'static str {
    match status {
        CheckStatus::Pass => "pass",
        CheckStatus::Warn => "warn",
        CheckStatus::Fail => "fail",
    }
}

/// Runs the command: 0 pass, 1 warn, 2 fail.
pub(crate) async fn run(context: &Context) -> Result<u8, Failure> {
    let diagnosis = context.client()?.diagnose().await?;
    context.out.document(&diagnosis, |out| {
        let columns: [Column<'_, Check>; 4] = [
            ("CHECK", Box::new(|c| text(&c.name))),
            ("STATUS", Box::new(|c| status(word(c.status)))),
            ("TIME", Box::new(|c| text(format!("{} ms", c.duration_ms)))),
            ("MESSAGE", Box::new(|c| text(&c.message))),
        ];
        out.table(&diagnosis.checks, &columns)
    })?;
    Ok(match diagnosis.status {
        CheckStatus::Pass => 0,
        CheckStatus::Warn => FAILED,
        CheckStatus::Fail => VERDICT,
    })
}
