package lakevision;

import io.delta.storage.HadoopFileSystemLogStore;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.s3a.S3AFileSystem;
import org.apache.hadoop.fs.s3a.S3AUtils;
import org.apache.hadoop.fs.s3a.impl.PutObjectOptions;
import org.apache.hadoop.io.IOUtils;
import software.amazon.awssdk.awscore.exception.AwsServiceException;
import software.amazon.awssdk.core.exception.SdkException;
import software.amazon.awssdk.core.sync.RequestBody;
import software.amazon.awssdk.services.s3.S3Client;
import software.amazon.awssdk.services.s3.model.PutObjectRequest;

/**
 * Commits Delta's log to S3 by conditional puts, so that of two drivers with the same version only one succeeds.
 *
 * Delta's own log store for S3 excludes other commits of its own driver only. This one differs from it in the put:
 * `If-None-Match: *` makes the server refuse to replace an object. Hadoop's own conditional create can neither end
 * with a lease nor know a commit whose response was lost, so the request is sent here, by Hadoop's client, with its
 * credentials and encryption. It is compiled on first use, as HadoopFiles.java is.
 */
public final class ConditionalPutLogStore extends HadoopFileSystemLogStore {
    private static final int EXISTS = 412;
    /** Another put of the same object was under way: S3 asks to try again. */
    private static final int CONFLICT = 409;
    private static final int MAX_CONFLICTS = 20;
    /** Times of System.nanoTime up to which this driver may commit, by table; a table without one has no limit. */
    private static final Map LEASES = new ConcurrentHashMap();

    /** Creates the log store; Delta calls it by name. */
    public ConditionalPutLogStore(Configuration settings) {
        super(settings);
    }

    /** Lets this driver commit to a table for some milliseconds more. */
    public static void lease(String table, long millis) {
        LEASES.put(new Path(table).toUri().getPath() + "/", Long.valueOf(System.nanoTime() + millis * 1000000L));
    }

    /** Ends the lease of a table, with its limit. */
    public static void release(String table) {
        LEASES.remove(new Path(table).toUri().getPath() + "/");
    }

    private static void checkLease(Path path) throws IOException {
        for (Iterator leases = LEASES.entrySet().iterator(); leases.hasNext();) {
            Map.Entry lease = (Map.Entry) leases.next();
            boolean applies = path.toUri().getPath().startsWith((String) lease.getKey());
            if (applies && System.nanoTime() - ((Long) lease.getValue()).longValue() > 0) {
                throw new IOException("the lease of this driver has ended, so that another may write to " + path);
            }
        }
    }

    /** Writes a file of the log, one action per line; without overwrite, it fails if the file exists. */
    public void write(Path path, Iterator actions, Boolean overwrite, Configuration settings) throws IOException {
        ByteArrayOutputStream lines = new ByteArrayOutputStream();
        while (actions.hasNext()) {
            lines.write(((String) actions.next()).getBytes(StandardCharsets.UTF_8));
            lines.write('\n');
        }
        FileSystem system = path.getFileSystem(settings);
        if (overwrite.booleanValue()) {
            FSDataOutputStream stream = system.create(path, true);
            try {
                stream.write(lines.toByteArray());
            } finally {
                stream.close();
            }
            return;
        }
        if (!(system instanceof S3AFileSystem)) {
            throw new IOException(system.getClass().getName() + " has no conditional puts: set the log store of " + path);
        }
        // On a server that ignores the header, the check excludes the other threads of this driver, as Delta's does.
        synchronized (ConditionalPutLogStore.class) {
            if (system.exists(path)) throw new FileAlreadyExistsException(path.toString());
            create((S3AFileSystem) system, path, lines.toByteArray());
        }
    }

    private static void create(S3AFileSystem system, Path path, byte[] content) throws IOException {
        S3Client client = system.getS3AInternals().getAmazonS3Client("commit to Delta's log");
        PutObjectRequest.Builder put = (PutObjectRequest.Builder) system.getRequestFactory().newPutObjectRequestBuilder(
            system.pathToKey(path), PutObjectOptions.defaultOptions(), (long) content.length, false);
        put.ifNoneMatch("*");
        PutObjectRequest request = (PutObjectRequest) put.build();
        for (int conflicts = 0;; conflicts++) {
            checkLease(path);
            try {
                client.putObject(request, RequestBody.fromBytes(content));
                return;
            } catch (AwsServiceException error) {
                if (error.statusCode() == EXISTS) {
                    // The client repeats a put whose response was lost; then the object is this commit itself.
                    if (Arrays.equals(content, read(system, path))) return;
                    throw new FileAlreadyExistsException(path.toString());
                }
                if (error.statusCode() != CONFLICT || conflicts == MAX_CONFLICTS) {
                    throw S3AUtils.translateException("put", path, error);
                }
            } catch (SdkException error) {
                throw S3AUtils.translateException("put", path, error);
            }
        }
    }

    private static byte[] read(FileSystem system, Path path) throws IOException {
        ByteArrayOutputStream content = new ByteArrayOutputStream();
        FSDataInputStream stream = system.open(path);
        try {
            IOUtils.copyBytes(stream, content, 1 << 16, false);
        } finally {
            stream.close();
        }
        return content.toByteArray();
    }

    /** Returns false: an object becomes visible as a whole. */
    public Boolean isPartialWriteVisible(Path path, Configuration settings) {
        return Boolean.FALSE;
    }
}
