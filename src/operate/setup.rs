//! Settings of a limiter for operators, and of a semaphore.

use std::borrow::Cow;

use crate::{
    builder::LimiterBuilder,
    operable::{Identity, MAX_LABEL},
    semaphore::Semaphore,
};

impl LimiterBuilder {
    /// Lets [operators](crate::operate) see this replica's permits and waiting requests. Default: off.
    ///
    /// The limiter then has one more connection to its store, with a separate task that answers operators' queries. No
    /// request waits for this task. The store's user needs further rights: see [Running Redis](crate::guide::redis).
    /// Without these rights the limiter works as before, and logs one warning. The limiter's layers watch each response, as
    /// with [`OnLost::Abort`](crate::OnLost::Abort), so that an operator can revoke its permit. In memory, an operator of
    /// this process needs no such setting.
    ///
    /// The limiter then connects and shuts down on a Tokio runtime with timers and IO, even with
    /// [`dedicated_thread`](Self::dedicated_thread); elsewhere both panic.
    pub fn operable(mut self) -> Self {
        self.identity.operable = true;
        self
    }

    /// Sets the label of this replica in the views for operators. Default: the host's name.
    ///
    /// A label has 1 to 64 characters, none of them a control character.
    pub fn replica_label(mut self, label: impl Into<String>) -> Self {
        self.identity.label = Some(label.into());
        self
    }

    /// Shows operators the keys of callers. Default: their digests only.
    ///
    /// Keys are often credentials, such as API keys, and answers to operators pass through the store. Show keys only if
    /// they are names. A key of more than 64 bytes is still shown as a digest.
    pub fn show_keys(mut self) -> Self {
        self.identity.shows_keys = true;
        self
    }
}

impl Identity {
    /// The label, or by default the host's name.
    pub(crate) fn label(&self) -> String {
        self.label.clone().unwrap_or_else(|| {
            let host = gethostname::gethostname();
            let host = host.to_string_lossy();
            let shown = host.chars().filter(|character| !character.is_control());
            shown.take(MAX_LABEL).collect()
        })
    }
}

impl Semaphore {
    /// Labels the semaphore's permits and queued requests for [operators](crate::operate). Default: no label.
    ///
    /// The label describes the work, such as the name of the job: do not put secrets into it. Labels are truncated to 128
    /// bytes.
    ///
    /// ```
    /// # use tower_turnstile::{Limit, Limiter};
    /// const JOBS: Limit = Limit::concurrent("jobs", 5);
    ///
    /// let jobs = Limiter::in_memory().semaphore(&JOBS, "acme")?.label("nightly report");
    /// # Ok::<(), tower_turnstile::ConfigError>(())
    /// ```
    #[must_use]
    pub fn label(self, label: impl Into<Cow<'static, str>>) -> Self {
        self.labelled(label.into().into())
    }
}
